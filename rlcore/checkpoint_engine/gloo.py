"""Engine `gloo`: buckets over TCP by torch's gloo, between processes of one host.

One process group of two ranks per replica: a replica that dies breaks its own transfer and no
other's. The sender's store, by which the two find each other, and the transfers listen on the
address `engine_kwargs.gloo.host` only.
"""

import threading
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from rlcore.checkpoint_engine.base import (
    CHECKPOINT_ENGINES,
    WEIGHT_RECEIVERS,
    Outcome,
    Replica,
    TransferSettings,
)
from rlcore.checkpoint_engine.buffer import Bucket, WeightBuffer, split_buckets
from rlcore.checkpoint_engine.segment import map_segment
from rlcore.checkpoint_engine.sender import push_through_child
from rlcore.errors import WeightTransferError
from rlcore.tcp_store import open_store
from rlcore.types import CallKey, WeightMeta

# torch's stubs do not export the stores.
_torch: Any = dist
DEFAULT_HOST = "127.0.0.1"
IN_FLIGHT = 2
"""Buckets that are on their way at a time: one travels while the one before is hashed."""


@CHECKPOINT_ENGINES.register("gloo")
class GlooCheckpointEngine:
    """Sends buckets from a child process of the caller to every replica at once.

    Options: `host`, the address of the sender's host that replicas can reach.
    """

    def __init__(self, settings: TransferSettings) -> None:
        self._settings = settings

    def push(
        self, key: CallKey, meta: WeightMeta, replicas: Mapping[str, Replica]
    ) -> dict[str, Outcome]:
        """Load `meta` in every replica and return by name how it went.

        Raises:
            WeightTransferError: the sending process failed, died or does not answer.
        """
        return push_through_child("gloo", self._settings, key, meta, replicas)


class GlooSender:
    """The sending rank of every pair; runs in the child."""

    def __init__(self) -> None:
        self._store: Any = None
        self._threads: dict[str, threading.Thread] = {}
        self._errors: dict[str, str] = {}

    def open(
        self, meta: WeightMeta, replicas: list[str], settings: TransferSettings
    ) -> dict[str, dict[str, Any]]:
        """Wait for every replica in a thread of its own and send it all buckets."""
        host = settings.options.get("host", DEFAULT_HOST)
        if self._store is None:
            self._store = open_store(host)
        data = torch.from_numpy(map_segment(meta, writable=True))
        push = uuid4().hex
        self._errors.clear()
        for name in replicas:
            arguments = (name, f"{push}/{name}", data, meta, settings)
            self._threads[name] = threading.Thread(target=self._send, args=arguments, daemon=True)
            self._threads[name].start()
        shared = {"host": host, "port": self._store.port}
        return {name: {**shared, "prefix": f"{push}/{name}"} for name in replicas}

    def close(self, deadline_s: float) -> None:
        """Wait until all is sent.

        Raises:
            WeightTransferError: it is not, after `deadline_s`.
        """
        for name, thread in self._threads.items():
            thread.join(deadline_s)
            if thread.is_alive():
                self._errors[name] = f"not all is sent after {deadline_s:g} s"
        self._threads.clear()
        if self._errors:
            raise WeightTransferError("; ".join(f"{n}: {e}" for n, e in self._errors.items()))

    def _send(
        self,
        name: str,
        prefix: str,
        data: torch.Tensor,
        meta: WeightMeta,
        settings: TransferSettings,
    ) -> None:
        try:
            store = _torch.PrefixStore(prefix, self._store)
            group = new_pair(store, 0, settings.options, settings.bucket_deadline_s)
            works: list[Any] = []
            for bucket in split_buckets(meta.num_bytes, settings.bucket_bytes):
                works.append(group.send([data[bucket.start : bucket.end]], 1, bucket.index))
                if len(works) > IN_FLIGHT:
                    works.pop(0).wait()
            for work in works:
                work.wait()
        except RuntimeError as error:  # all that gloo raises
            self._errors[name] = str(error).splitlines()[0]


@WEIGHT_RECEIVERS.register("gloo")
class GlooReceiver:
    """The receiving rank of a pair; runs in the replica."""

    def receive(self, meta: WeightMeta, buffer: WeightBuffer) -> Iterator[Bucket]:
        """Fill `buffer` from the sender.

        Raises:
            WeightTransferError: the sender died or stalled.
        """
        transport = meta.transport
        deadline_s = transport["bucket_deadline_s"]
        try:
            store = _torch.TCPStore(
                transport["host"],
                transport["port"],
                is_master=False,
                timeout=timedelta(seconds=deadline_s),
            )
            store = _torch.PrefixStore(transport["prefix"], store)
            group = new_pair(store, 1, transport, deadline_s)
            target = torch.from_numpy(buffer.data)
            coming: list[tuple[Bucket, Any]] = []
            for bucket in split_buckets(meta.num_bytes, transport["bucket_bytes"]):
                work = group.recv([target[bucket.start : bucket.end]], 0, bucket.index)
                coming.append((bucket, work))
                if len(coming) > IN_FLIGHT:
                    yield _arrived(buffer, *coming.pop(0))
            while coming:
                yield _arrived(buffer, *coming.pop(0))
        except RuntimeError as error:  # all that gloo raises
            # What is on its way may still arrive, and must not find weights that are in use.
            buffer.discard()
            if isinstance(error, WeightTransferError):
                raise
            raise WeightTransferError(
                f"weight version {meta.version}: gloo's sender (pid {transport['sender_pid']}) "
                f"died or stalled: {str(error).splitlines()[0]}"
            ) from error
        except GeneratorExit:
            buffer.discard()
            raise


def new_pair(
    store: Any, rank: int, options: Mapping[str, Any], deadline_s: float
) -> dist.ProcessGroup:
    """Return a process group of two ranks that belongs to nothing global.

    Raises:
        RuntimeError: the other rank did not come within `deadline_s`.
    """
    gloo = _torch.ProcessGroupGloo
    chosen = gloo._Options()
    chosen._timeout = timedelta(seconds=deadline_s)
    chosen._devices = [gloo.create_device(hostname=options.get("host", DEFAULT_HOST))]
    return gloo(store, rank, 2, chosen)


def _arrived(buffer: WeightBuffer, bucket: Bucket, work: Any) -> Bucket:
    work.wait()
    buffer.filled(bucket)
    return bucket
