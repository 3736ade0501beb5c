"""The queue's host: one detached actor per Ray cluster that owns TransferQueue's actors.

Detached, because the queue's actors die with their creator and several drivers may share a queue; a
run that is the last to leave ends it. AgentLoopWorkers send numpy rows here and need no torch;
executors and training workers attach as clients themselves (rlcore/buffer/transfer_queue.py). The
queue's sockets are unauthenticated pickle: private networks only.
"""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError as ActorRestartingError
from ray.exceptions import GetTimeoutError, RayActorError

from rlcore.buffer.tenants import Tenant, Tenants
from rlcore.cluster.calls import kill_actor, wait_for_reply
from rlcore.errors import ConfigError, DataError, DeadlineExceededError, DeviceLockError
from rlcore.types import CallKey

logger = logging.getLogger(__name__)

HOST_NAME = "rollflow-queue-host"
NAMESPACE = "rollflow"
PROBE_S = 5.0
"""How long a witness may take to answer before it counts as alive but busy."""
RESOURCES_S = 5.0
"""How long Ray may take to report free CPUs after it started."""

Row = dict[str, np.ndarray]


@ray.remote(  # pyright: ignore[reportCallIssue] (Ray's stubs know no concurrency_groups)
    num_cpus=0,
    max_restarts=0,
    max_task_retries=0,
    concurrency_groups={"control": 4, "rows": 8},
)
class QueueHostActor:
    """Owns the queue, knows whose it is, and stores the rows of the AgentLoopWorkers."""

    def __init__(self, deadline_s: float) -> None:
        from rlcore.buffer.transfer_queue import QueueClient

        self._queue = QueueClient(deadline_s)
        self._tenants = Tenants()
        self._witnesses: dict[str, ActorHandle | None] = {}
        self._lock = threading.Lock()
        self._is_started = False

    @ray.method(concurrency_group="control")
    def start(self, num_storage_units: int) -> None:
        """Create the queue's actors; a repeat does nothing."""
        from rlcore.buffer.transfer_queue import start_transfer_queue

        with self._lock:
            if not self._is_started:
                start_transfer_queue(num_storage_units)
                self._is_started = True

    @ray.method(concurrency_group="control")
    def acquire(self, run_id: str, attempt: int, shared: bool, witness: ActorHandle | None) -> None:
        """Let a run in; see Tenants.acquire.

        Args:
            run_id: The run.
            attempt: The fencing token.
            shared: Whether it agrees to share the queue.
            witness: An actor that dies with the run's driver: when it is dead, so is the run, and
                its hold on the queue ends. None holds until `release`.
        """
        tenant = Tenant(run_id=run_id, attempt=attempt, shared=shared)
        with self._lock:
            try:
                self._tenants.acquire(tenant)
            except DeviceLockError:
                if not self._drop_dead_runs(besides=run_id):
                    raise
                self._tenants.acquire(tenant)
            self._witnesses[run_id] = witness

    @ray.method(concurrency_group="control")
    def release(self, run_id: str, attempt: int) -> list[str]:
        """Let a run out and drop its rows; return the runs that remain."""
        with self._lock:
            remaining = self._tenants.release(run_id, attempt)
            self._witnesses.pop(run_id, None)
        if remaining:
            self._clear_run(run_id)
        return remaining

    @ray.method(concurrency_group="control")
    def runs(self) -> list[str]:
        """Return the ids of the runs that use the queue."""
        return self._tenants.runs()

    @ray.method(concurrency_group="rows")
    def put_rows(
        self,
        caller: CallKey | int,
        partition_id: str,
        keys: Sequence[str],
        rows: Sequence[Row],
        tags: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """Store whole rows in one batch; the same key again overwrites.

        Args:
            caller: A key, or the attempt alone.
            partition_id: `{run_id}/train` or `{run_id}/val`.
            keys: One per row.
            rows: Column to 1-D array, the same columns in all of them.
            tags: One per row, for readers of the queue.

        Raises:
            FencedError: an older attempt, or a run that does not hold the queue.
            DataError: a row's columns, dtype or lengths are wrong.
            DeadlineExceededError, ActorUnavailableError: the queue.
        """
        self._tenants.admit(caller, partition_id)
        columns = _to_columns(keys, rows)
        self._queue.put(partition_id, keys, columns, tags=tags, create=True)

    @ray.method(concurrency_group="rows")
    def clear_partition(self, caller: CallKey | int, partition_id: str) -> None:
        """Remove a partition with all its rows, stragglers of dead sessions included."""
        self._tenants.admit(caller, partition_id)
        self._queue.clear_partition(partition_id)

    def _drop_dead_runs(self, *, besides: str) -> bool:
        dead = [
            run for run, witness in self._witnesses.items() if run != besides and _is_dead(witness)
        ]
        for run_id in dead:
            logger.warning("run %s died without releasing the queue; its rows are dropped", run_id)
            self._tenants.evict(run_id)
            del self._witnesses[run_id]
            self._clear_run(run_id)
        return bool(dead)

    def _clear_run(self, run_id: str) -> None:
        for partition_id in self._queue.partitions():
            if partition_id.split("/")[0] == run_id:
                self._queue.clear_partition(partition_id)


class QueueHostClient:
    """The host for synchronous code in another process.

    Raises in every method besides the host's own errors:
        DeadlineExceededError: no answer within the deadline.
        ActorUnavailableError: the host's process died.
    """

    def __init__(self, handle: ActorHandle, deadline_s: float = 60.0) -> None:
        self.handle = handle
        self.deadline_s = deadline_s

    def put_rows(
        self,
        caller: CallKey | int,
        partition_id: str,
        keys: Sequence[str],
        rows: Sequence[Row],
        tags: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """See QueueHostActor.put_rows."""
        self._call("put_rows", caller, partition_id, list(keys), list(rows), tags)

    def clear_partition(self, caller: CallKey | int, partition_id: str) -> None:
        """See QueueHostActor.clear_partition."""
        self._call("clear_partition", caller, partition_id)

    def runs(self) -> list[str]:
        """See QueueHostActor.runs."""
        return self._call("runs")

    def _call(self, method: str, *args: Any) -> Any:
        reply = getattr(self.handle, method).remote(*args)
        return wait_for_reply(reply, what=f"queue host.{method}", deadline_s=self.deadline_s)


def start_queue_host(
    run_id: str,
    attempt: int,
    *,
    shared: bool = False,
    witness: ActorHandle | None = None,
    num_storage_units: int = 1,
    deadline_s: float = 60.0,
    start_s: float = 120.0,
) -> QueueHostClient:
    """Start the cluster's queue host, or find it, and let the run in.

    Args:
        run_id: The run.
        attempt: The fencing token.
        shared: Whether the run shares the queue with others that do.
        witness: An actor that dies with this run's driver, e.g. its ledger.
        num_storage_units: Processes that hold rows; for a new host only.
        deadline_s: For each call to the host and to the queue.
        start_s: For the start.

    Raises:
        ConfigError: the cluster has too few free CPUs for the queue's actors.
        DeviceLockError: another run uses the queue; names it.
        FencedError: a higher attempt of this run has been seen.
        ActorUnavailableError: the host died, or a TransferQueue of another program is there.
        DeadlineExceededError: it did not start in time.
    """
    handle = _find_host()
    is_new = handle is None
    if handle is None:
        _wait_until_controller_is_gone(run_id, start_s)
        _check_cpus(num_storage_units)
        actor_class: Any = QueueHostActor
        handle = actor_class.options(
            name=HOST_NAME, namespace=NAMESPACE, lifetime="detached", get_if_exists=True
        ).remote(deadline_s)
    try:
        wait_for_reply(
            handle.start.remote(num_storage_units), what="queue host.start", deadline_s=start_s
        )
    except BaseException:
        if is_new:
            kill_actor(handle)
        raise
    wait_for_reply(
        handle.acquire.remote(run_id, attempt, shared, witness),
        what="queue host.acquire",
        deadline_s=deadline_s,
    )
    return QueueHostClient(handle, deadline_s)


def stop_queue_host(run_id: str, attempt: int, *, deadline_s: float = 20.0) -> None:
    """Let the run out; the last one ends the host and waits until the queue's actors are gone.

    Raises:
        FencedError: a higher attempt of this run uses the queue.
        DeadlineExceededError: the host or its actors did not end in time.
    """
    handle = _find_host()
    if handle is None:
        return
    ends = time.monotonic() + deadline_s
    remaining = wait_for_reply(
        handle.release.remote(run_id, attempt), what="queue host.release", deadline_s=deadline_s
    )
    if remaining:
        return
    kill_actor(handle)
    _wait_until_controller_is_gone(run_id, ends - time.monotonic())


def _find_host() -> Any:
    try:
        return ray.get_actor(HOST_NAME, namespace=NAMESPACE)
    except ValueError:
        return None


def _wait_until_controller_is_gone(run_id: str, deadline_s: float) -> None:
    """Wait for the actors of a host that has ended: Ray ends them after it, without an event."""
    # Imported late here and below: it needs torch, which this module's other users do not want.
    from rlcore.buffer.transfer_queue import find_controller

    ends = time.monotonic() + deadline_s
    while find_controller() is not None:
        if time.monotonic() > ends:
            raise DeadlineExceededError(
                f"run {run_id} waited {deadline_s:g} s until an earlier TransferQueue's controller "
                "ended; if another program runs one on this Ray cluster, use another"
            )
        time.sleep(0.1)


def _check_cpus(num_storage_units: int) -> None:
    """Refuse at once where TransferQueue would wait for CPUs for ever."""
    needed = 1 + num_storage_units
    ends = time.monotonic() + RESOURCES_S
    while (free := ray.available_resources().get("CPU", 0.0)) < needed:
        total = ray.cluster_resources().get("CPU", 0.0)
        if 0 < total < needed or time.monotonic() > ends:
            raise ConfigError(
                f"the queue needs {needed} free CPUs of the Ray cluster (1 controller + "
                f"{num_storage_units} storage); {free:g} of {total:g} are free. Start Ray with "
                "more logical CPUs (ray.num_cpus, or `ray start --num-cpus`)"
            )
        time.sleep(0.2)


def _is_dead(witness: ActorHandle | None) -> bool:
    if witness is None:
        return False
    try:
        ray.get(witness.__ray_ready__.remote(), timeout=PROBE_S)
    except ActorRestartingError:
        return False  # it is being started anew
    except RayActorError:
        return True
    except GetTimeoutError:
        return False
    return False


def _to_columns(keys: Sequence[str], rows: Sequence[Row]) -> dict[str, list[Any]]:
    import torch

    if len(rows) != len(keys) or not rows:
        raise DataError(f"{len(keys)} row keys and {len(rows)} rows")
    names = list(rows[0])
    required = {"prompts", "responses", "response_mask"}
    for key, row in zip(keys, rows, strict=True):
        if set(row) != set(names) or not required <= set(row):
            raise DataError(
                f"row {key} has the columns {sorted(row)}, needed are {sorted(required)} and the "
                f"same as in the other rows: {sorted(names)}"
            )
    # Copies: arrays that came through Ray's object store are read-only.
    return {name: [torch.from_numpy(np.array(row[name])) for row in rows] for name in names}
