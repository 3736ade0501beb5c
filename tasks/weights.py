"""The weight manager that hooks see: each call is a retriable Prefect task on the step's page."""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prefect import Task
from prefect.cache_policies import NO_CACHE

from rlcore.checkpoint_engine.base import Replica
from rlcore.checkpoint_engine.manager import CheckpointEngineManager
from rlcore.cluster.executor import require_executor
from rlcore.rollout.health import HealthLimits
from rlcore.types import CallKey
from tasks.deadlines import PhaseDeadlines
from tasks.retry import PHASE_OPTIONS, PHASE_RETRY_DELAYS_S, PhaseOptions
from tasks.training_recovery import LOST


def manager_body(
    manager: CheckpointEngineManager, method: str, key: CallKey, args: tuple[Any, ...]
) -> Any:
    """Call one method of the plain manager; shipped to an executor."""
    require_executor(f"checkpoint_manager.{method}")
    return getattr(manager.with_key(key), method)(*args)


LONGEST_DELAY_S = 30.0
"""Between two tries: a replica that is back is used soon."""
MAX_LONG_DELAYS = 40
"""Prefect takes 50 delays in all; a start that may last longer makes them longer."""


def manager_options(start_s: float) -> PhaseOptions:
    """Return the options of a call that waits, if it has to, until a lost replica is replaced.

    The tries go on for as long as the watch over replicas takes to notice a loss and then gives
    the new one to load its model. Without jitter, which might shorten that: nobody else calls.

    Args:
        start_s: `deadlines.start`.
    """
    watch = HealthLimits()
    wanted_s = start_s + watch.check_every_s + watch.answer_s
    longest_s = max(LONGEST_DELAY_S, wanted_s / MAX_LONG_DELAYS)
    delays = list(PHASE_RETRY_DELAYS_S)
    delays += [longest_s] * math.ceil(max(0.0, wanted_s - sum(delays)) / longest_s)
    return {
        **PHASE_OPTIONS,
        "retries": len(delays),
        "retry_delay_seconds": delays,
        "retry_jitter_factor": 0.0,
    }


manager_call = Task(
    manager_body,
    name="update_weights",
    task_run_name="step-{key.global_step:04d}/{method}",
    cache_policy=NO_CACHE,
    persist_result=False,
    **PHASE_OPTIONS,
)
"""Each call sets its name, deadline and `manager_options`."""


class CallClock:
    """Measures how long calls are under way: a hook is not charged for them.

    Calls do not overlap: one thread runs the hooks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before_s = 0.0
        self._since: float | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the block."""
        with self._lock:
            self._since = began = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._since = None
                self._before_s += time.monotonic() - began

    def seconds(self) -> float:
        """Return the time of all calls so far, of one that is under way, too."""
        with self._lock:
            now_s = 0.0 if self._since is None else time.monotonic() - self._since
            return self._before_s + now_s


class TaskCheckpointManager:
    """Has verl's method names; called from a hook, in the hooks' thread, it waits for the task.

    Pickles as the plain manager, so that the copy of the trainer in an executor holds that one.

    Attributes:
        last_update: What the last update returned.
        clock: How long calls took, tries and the waits between them included.
    """

    def __init__(
        self,
        manager: CheckpointEngineManager,
        *,
        key: Callable[[str], CallKey],
        deadlines: PhaseDeadlines,
        start_s: float,
        restore: Callable[[Exception], None] | None = None,
    ) -> None:
        """Take a manager.

        Args:
            manager: The plain one.
            key: Names the caller of a phase.
            deadlines: Of the phases.
            start_s: For a replica to start, within which a lost one is replaced.
            restore: Brings a lost training group back, and waits for it; None: nothing does.
        """
        self._manager = manager
        self._key = key
        self._deadlines = deadlines
        self._options = manager_options(start_s)
        self._restore = restore
        self.last_update: dict[str, Any] = {}
        self.clock = CallClock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._manager,)

    def _call(self, method: str, *args: Any) -> Any:
        deadline_s = self._deadlines.for_phase("update_weights")
        call = manager_call.with_options(name=method, timeout_seconds=deadline_s, **self._options)
        began = time.monotonic()
        # Against whoever brings a restarted replica up: the body works on a copy of the manager.
        with self._manager.exclusive(), self.clock.running():
            result = self._result(call, method, args)
        if method == "update_weights":
            self._deadlines.record(method, time.monotonic() - began)
        return result

    def _result(self, call: Task[..., Any], method: str, args: tuple[Any, ...]) -> Any:
        while True:
            try:
                return call.submit(self._manager, method, self._key(method), args).result()
            except LOST as error:
                if self._restore is None:
                    raise
                self._restore(error)

    def update_weights(self, global_steps: int) -> dict[str, Any]:
        """Publish the trainer's weights to every replica; return what the plain manager does.

        Those that were lost are no members any more, of the driver's manager neither.
        """
        # Whoever waits for the lock is to find what the call has changed: the body had a copy.
        with self._manager.exclusive():
            members = dict(self._manager.replicas)
            self.last_update = self._call("update_weights", global_steps)
            self._manager.drop_lost(members, self.last_update["lost"])
        return self.last_update

    def add_replicas(self, replicas: Mapping[str, Replica]) -> int | None:
        """Bring replicas to the committed version and make them members; return the version."""
        with self._manager.exclusive():
            version = self._call("add_replicas", dict(replicas))
            self._manager.replicas.update(replicas)
        return version

    def remove_replicas(self, names: Iterable[str]) -> None:
        """Leave replicas out of later updates; what they do meanwhile is the caller's affair."""
        self._manager.remove_replicas(names)

    def sleep_replicas(self) -> None:
        """Free the replicas' memory."""
        self._each("sleep_replicas", "sleep")

    def wake_up_replicas(self) -> None:
        """Serve again with the last committed weights."""
        self._each("wake_up_replicas", "wake_up")

    def abort_replicas(self) -> None:
        """Stop all running requests; clients keep what was generated."""
        self._each("abort_replicas", "abort")

    def resume_generation_replicas(self) -> None:
        """Let replicas that were aborted or paused serve again."""
        self._each("resume_generation_replicas", "resume")

    def _each(self, method: str, of_replica: str) -> None:
        with self._manager.exclusive():
            self._call(method)
            self._manager.was_called(of_replica)


def _same(manager: CheckpointEngineManager) -> CheckpointEngineManager:
    return manager
