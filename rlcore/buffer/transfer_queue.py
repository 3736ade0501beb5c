"""The one adapter to TransferQueue: rows in, rows out, every call with a deadline.

Rows are 1-D tensors of the columns in rlcore/schema.py, addressed by (partition, key). What the
package answers in silence is an error here: a missing key, an unknown or half-written column, mixed
dtypes, lengths that differ, a dead controller. A client attaches on its first call and never closes
the queue: the actors belong to the host (rlcore/cluster/queue_host.py).

Rows lie in Ray actors (SimpleStorage) or in a Mooncake store, which takes no empty row: there each
row travels with one entry before its own. One file, though a long one: nothing else imports the
package.
"""

import asyncio
import functools
import logging
import os
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import ray
import torch
import transfer_queue as tq
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError
from tensordict import TensorDict

from rlcore import schema
from rlcore.buffer.row_checks import check_columns, check_keys, named
from rlcore.config.queue import MooncakeStoreConfig
from rlcore.daemon_thread import in_daemon_thread
from rlcore.errors import ActorUnavailableError, DataError, DeadlineExceededError

T = TypeVar("T")

CONTROLLER_NAME = "TransferQueueController"
CONTROLLER_NAMESPACE = "transfer_queue"
MOONCAKE = "MooncakeStore"

# Mooncake, where it is installed, reports every step of every client; read at its first use.
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
# Warns on every transfer where a machine has fewer than 8 cores.
logging.getLogger("transfer_queue.utils.common").setLevel(logging.ERROR)


def find_controller() -> ActorHandle | None:
    """Return the queue's controller of this Ray cluster, None when there is none."""
    try:
        return ray.get_actor(CONTROLLER_NAME, namespace=CONTROLLER_NAMESPACE)
    except ValueError:
        return None


def start_transfer_queue(num_storage_units: int, store: MooncakeStoreConfig | None = None) -> None:
    """Create controller and storage actors, owned by this process: they die with it.

    The caller bounds the wait: without free CPUs the package waits for its actors for ever.

    Args:
        num_storage_units: Processes of SimpleStorage.
        store: A Mooncake store whose servers run, in place of SimpleStorage.

    Raises:
        ActorUnavailableError: another program already runs a TransferQueue on this cluster.
    """
    # init() would attach to a foreign queue and ignore our configuration.
    if find_controller() is not None:
        raise ActorUnavailableError(
            "another program runs a TransferQueue on this Ray cluster; stop it, or use another "
            "cluster (its controller's name is fixed, so there can be one per cluster)"
        )
    simple = {"num_data_storage_units": num_storage_units}
    backend: dict[str, Any] = {"storage_backend": "SimpleStorage", "SimpleStorage": simple}
    if store is not None:
        backend = {"storage_backend": MOONCAKE, MOONCAKE: _client_settings(store)}
    # Without polling one starving fetch blocks every client for 5 s.
    config: dict[str, Any] = {"controller": {"polling_mode": True}, "backend": backend}
    tq.init(config)  # pyright: ignore[reportArgumentType] (merged as a plain mapping)


def _client_settings(store: MooncakeStoreConfig) -> dict[str, Any]:
    return {
        "auto_init": False,  # true would end every mooncake_master of this machine
        "metadata_server": store.metadata_server,
        "master_server_address": store.master_server_address,
        "local_hostname": store.local_hostname,
        "protocol": store.protocol,
        "device_name": store.device_name,
        # Rows lie with the store's holder: a client's own memory dies with the client.
        "global_segment_size": 0,
        "local_buffer_size": store.local_buffer_size,
    }


class QueueClient:
    """Reads and writes rows of the queue that the host of this Ray cluster owns.

    Safe to share between threads. Calls are synchronous; none outlives `deadline_s`.

    Example:
        >>> queue = QueueClient(deadline_s=60)
        >>> rows = queue.get("run-1/train", ["u1_0_0"], ["prompts", "responses"])
        >>> queue.put("run-1/train", ["u1_0_0"], {"advantages": [advantage]})
    """

    def __init__(self, deadline_s: float = 60.0) -> None:
        self.deadline_s = deadline_s
        self._lock = threading.Lock()
        self._client: tq.TransferQueueClient | None = None
        self._controller_id = ""
        self._is_suspect = False
        self._num_pads = 0
        """Entries before each row's own in this queue's storage."""

    def put(
        self,
        partition_id: str,
        keys: Sequence[str],
        columns: Mapping[str, Sequence[torch.Tensor]],
        *,
        tags: Sequence[Mapping[str, Any]] | None = None,
        create: bool = False,
    ) -> None:
        """Write whole columns of the rows `keys`; writing again overwrites.

        Args:
            partition_id: Where the rows are.
            keys: Distinct row keys.
            columns: Per column one 1-D tensor per key, of the schema's dtype.
            tags: One per key, a copy of the ledger's for readers of the queue.
            create: Whether unknown keys become new rows. Off, so that a late phase cannot revive
                rows that were cleared.

        Raises:
            DataError: a column, dtype or length is wrong, or a key is unknown.
            DeadlineExceededError: no answer within the deadline.
            ActorUnavailableError: the queue is not there or failed.
        """
        if not keys:
            return
        check_keys(keys)
        check_columns(keys, columns, f"put into {partition_id}")
        if tags is not None and len(tags) != len(keys):
            raise DataError(f"put into {partition_id}: {len(keys)} keys and {len(tags)} tags")

        async def write(client: tq.TransferQueueClient) -> int:
            meta = await client.async_kv_retrieve_meta(list(keys), partition_id, create=create)
            if meta.size == len(keys):
                if tags is not None:
                    meta.update_custom_meta([dict(tag) for tag in tags])
                await client.async_put(self._fields(columns, len(keys)), meta)
            return meta.size

        found = self._call(f"put {sorted(columns)} of {len(keys)} rows", partition_id, write)
        if found != len(keys):
            self._raise_missing(partition_id, keys)

    def get(
        self, partition_id: str, keys: Sequence[str], columns: Sequence[str]
    ) -> dict[str, list[torch.Tensor]]:
        """Return per column one 1-D tensor per key, in the order of `keys`.

        Raises:
            DataError: a key is unknown, a row lacks a column, or what is stored has another dtype
                or length than the schema says.
            DeadlineExceededError: no answer within the deadline.
            ActorUnavailableError: the queue is not there or failed.
        """
        for name in columns:
            schema.column(name)
        if not keys:
            return {name: [] for name in columns}
        check_keys(keys)

        async def read(client: tq.TransferQueueClient) -> tuple[int, TensorDict | None]:
            meta = await client.async_kv_retrieve_meta(list(keys), partition_id, create=False)
            # The package answers an unknown column with an empty result.
            if meta.size != len(keys) or not set(columns) <= set(meta.field_names):
                return meta.size, None
            return meta.size, await client.async_get_data(meta.select_fields(list(columns)))

        found, data = self._call(f"get {list(columns)} of {len(keys)} rows", partition_id, read)
        if found != len(keys):
            self._raise_missing(partition_id, keys)
        if data is None:
            lacking = self.incomplete(partition_id, keys, columns)
            raise DataError(
                f"{len(lacking)} of {len(keys)} rows of {partition_id} lack one of the columns "
                f"{list(columns)}: {named(lacking)}"
            )
        rows = {name: _to_rows(data[name], self._num_pads) for name in columns}
        check_columns(keys, rows, f"get from {partition_id}")
        return rows

    def incomplete(
        self, partition_id: str, keys: Sequence[str], columns: Sequence[str]
    ) -> list[str]:
        """Return those of `keys` that are unknown or lack one of `columns`.

        Raises:
            DeadlineExceededError: no answer within the deadline.
            ActorUnavailableError: the queue is not there or failed.
        """

        async def is_whole(client: tq.TransferQueueClient, part: list[str]) -> bool:
            meta = await client.async_kv_retrieve_meta(part, partition_id, create=False)
            return meta.size == len(part) and set(columns) <= set(meta.field_names)

        async def find(client: tq.TransferQueueClient) -> list[str]:
            # The controller tells which columns *all* asked rows have: ask for all, then singly.
            if await is_whole(client, list(keys)):
                return []
            return [key for key in keys if not await is_whole(client, [key])]

        if not keys:
            return []
        return self._call(f"look up {len(keys)} rows", partition_id, find)

    def clear(self, partition_id: str, keys: Sequence[str]) -> None:
        """Remove rows; unknown keys are fine, so a repeat is.

        Raises:
            DeadlineExceededError: no answer within the deadline.
            ActorUnavailableError: the queue is not there or failed.
        """

        async def remove(client: tq.TransferQueueClient) -> None:
            meta = await client.async_kv_retrieve_meta(list(keys), partition_id, create=False)
            if meta.size:
                await client.async_clear_samples(meta)

        if keys:
            self._call(f"clear {len(keys)} rows", partition_id, remove)

    def clear_partition(self, partition_id: str) -> None:
        """Remove a partition; an emptied one stays listed until this is called.

        Raises:
            DeadlineExceededError: no answer within the deadline.
            ActorUnavailableError: the queue is not there or failed.
        """
        if partition_id in self.partitions():
            self._call(
                "clear the partition",
                partition_id,
                lambda client: client.async_clear_partition(partition_id),
            )

    def partitions(self) -> list[str]:
        """Return the names of all partitions, of every run.

        Raises:
            DeadlineExceededError: no answer within the deadline.
            ActorUnavailableError: the queue is not there or failed.
        """
        return sorted(
            self._call("list all partitions", "", lambda client: client.async_kv_list(None))
        )

    def detach(self) -> None:
        """Give back this client's sockets and thread; the queue stays. A later call attaches."""
        with self._lock:
            client, self._client, self._controller_id = self._client, None, ""
        if client is not None:
            client.close()

    def _call(
        self,
        what: str,
        partition_id: str,
        make: Callable[[tq.TransferQueueClient], Coroutine[Any, Any, T]],
    ) -> T:
        client = self._attached()
        # The package sets torch's process-wide thread count round each transfer and "restores" what
        # it found at its import; a pinned count must survive.
        num_threads = torch.get_num_threads()
        future = asyncio.run_coroutine_threadsafe(make(client), client._loop)
        try:
            return future.result(self.deadline_s)
        except TimeoutError:
            future.cancel()
            self._is_suspect = True
            state = "is gone" if find_controller() is None else "is alive"
            raise DeadlineExceededError(
                f"process {os.getpid()} waited {self.deadline_s:g} s for the TransferQueue to "
                f"{what} of {partition_id or 'the queue'}; its controller {state}"
            ) from None
        except (RuntimeError, OSError) as error:
            self._is_suspect = True
            raise ActorUnavailableError(
                f"the TransferQueue failed to {what} of {partition_id or 'the queue'}: {error}"
            ) from error
        finally:
            torch.set_num_threads(num_threads)

    def _attached(self) -> tq.TransferQueueClient:
        """Return the client, attached to the controller that is there now."""
        with self._lock:
            if self._client is not None and not self._is_suspect:
                return self._client
            controller = find_controller()
            if controller is None:
                raise ActorUnavailableError(
                    "there is no TransferQueue on this Ray cluster: its host is not started or died"
                )
            controller_id = controller._actor_id.hex()
            if self._client is None or controller_id != self._controller_id:
                # A client of a dead controller is dropped, not closed: others may wait on it.
                self._client = self._attach(controller)
                self._controller_id = controller_id
            self._is_suspect = False
            return self._client

    def _attach(self, controller: ActorHandle) -> tq.TransferQueueClient:
        # Not tq.init(): it would create a queue of this process's own if the host were not there,
        # and its client is a global of the process.
        try:
            config: Any = ray.get(controller.get_config.remote(), timeout=self.deadline_s)
        except GetTimeoutError:
            config = None
        except RayActorError as error:
            raise ActorUnavailableError(f"the TransferQueue controller died: {error}") from error
        if config is None:
            raise DeadlineExceededError(
                f"process {os.getpid()} waited for the host to configure the TransferQueue's "
                "controller"
            )
        client = self._connect_in_time(config)
        self._num_pads = 1 if config.backend.storage_backend == MOONCAKE else 0
        return client

    def _connect_in_time(self, config: Any) -> tq.TransferQueueClient:
        # Mooncake's library waits for a master that does not answer without an end.
        connecting = in_daemon_thread(self._connect, config, name="attach to the queue")
        try:
            return connecting.result(self.deadline_s)
        except TimeoutError:
            connecting.add_done_callback(_close_late_client)
            raise DeadlineExceededError(
                f"process {os.getpid()} waited {self.deadline_s:g} s to attach to the "
                f"TransferQueue's {config.backend.storage_backend}"
            ) from None

    def _connect(self, config: Any) -> tq.TransferQueueClient:
        client = tq.TransferQueueClient(
            client_id=f"rollflow-{os.getpid()}-{uuid.uuid4().hex[:8]}",
            controller_info=config.controller.zmq_info,
        )
        backend = config.backend.storage_backend
        client.initialize_storage_manager(manager_type=backend, config=config.backend[backend])
        return client

    def _fields(self, columns: Mapping[str, Sequence[torch.Tensor]], num_rows: int) -> TensorDict:
        pads = self._num_pads
        if pads:
            columns = {
                name: [torch.nn.functional.pad(row, (pads, 0)) for row in rows]
                for name, rows in columns.items()
            }
        return TensorDict(
            {name: _to_nested(rows) for name, rows in columns.items()}, batch_size=[num_rows]
        )

    def _raise_missing(self, partition_id: str, keys: Sequence[str]) -> None:
        known = self.list(partition_id)
        missing = [key for key in keys if key not in known]
        raise DataError(
            f"{len(missing)} of {len(keys)} rows are not in partition {partition_id}: "
            f"{named(missing)}"
        )

    # Last in the class: its name hides the builtin for the annotations that follow it.
    def list(self, partition_id: str) -> dict[str, dict[str, Any]]:
        """Return the keys of a partition with their tags; a key is listed before its data is there.

        Raises:
            DeadlineExceededError: no answer within the deadline.
            ActorUnavailableError: the queue is not there or failed.
        """
        found = self._call(
            "list the keys", partition_id, lambda client: client.async_kv_list(partition_id)
        )
        return found.get(partition_id, {})


@functools.cache
def attached_queue(deadline_s: float = 60.0) -> QueueClient:
    """Return this process's client with that deadline: phases that share it attach once."""
    return QueueClient(deadline_s)


def _close_late_client(connecting: "Future[tq.TransferQueueClient]") -> None:
    if connecting.exception() is None:
        connecting.result().close()


def _to_nested(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    # Always jagged: a rectangular batch would come back in another form than a ragged one.
    return torch.nested.as_nested_tensor(
        [row.detach().cpu().contiguous() for row in rows], layout=torch.jagged
    )


def _to_rows(column: Any, num_pads: int) -> list[torch.Tensor]:
    # What comes back are views of a receive buffer: the rows of a column share one copy of it.
    if column.layout == torch.jagged:
        rows = column.values().clone().split(column.offsets().diff().tolist())
    else:  # all of one length, or a form that a later version of the package returns
        rows = [row.clone() for row in column.unbind()]
    return [row[num_pads:] for row in rows]
