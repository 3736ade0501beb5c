"""Buckets between two ranks of a process group of torch's: what `gloo` and `nccl` have in common.

One group of two ranks per replica: a replica that dies breaks its own transfer and no other's. The
sender's store, by which the two find each other, listens on the address of option `host` only.
Where the library moves a device's memory, a bucket is copied there before it is sent, and back into
the replica's buffer when it has come.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist

from rlcore.checkpoint_engine.base import TransferSettings
from rlcore.checkpoint_engine.buffer import Bucket, WeightBuffer, split_buckets
from rlcore.checkpoint_engine.segment import map_segment
from rlcore.errors import WeightSyncError, WeightTransferError
from rlcore.tcp_store import open_store
from rlcore.types import WeightMeta

# torch's stubs do not export the stores.
_torch: Any = dist
DEFAULT_HOST = "127.0.0.1"
IN_FLIGHT = 2
"""Buckets that are on their way at a time: one travels while the one before is hashed."""

Options = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairLibrary:
    """A library that joins two ranks."""

    name: str
    new_group: Callable[[Any, int, Options, float], dist.ProcessGroup]
    """Of store, rank, options and deadline; raises RuntimeError when the other does not come. To
    wait for its works blocks this thread, for the deadline at most."""
    device: Callable[[Options], torch.device] | None = None
    """Whose memory it moves; None: the host's, where the bytes lie already."""
    place: Callable[[torch.device], str] = str
    """A device's name in all processes of all hosts: it joins none with itself."""
    release: Callable[[dist.ProcessGroup], None] | None = None
    """Ends a group whose works are over, or are to be broken off; None: it ends when it is let
    go."""

    def device_of(self, options: Options) -> torch.device | None:
        """Return the device of this process's end; None: the host."""
        return None if self.device is None else self.device(options)

    def end(self, group: dist.ProcessGroup) -> None:
        """End a group whose works are over, or are to be broken off."""
        if self.release is not None:
            self.release(group)


class PairSender:
    """The sending rank of every pair; runs in the child."""

    library: PairLibrary
    """Of the subclass."""

    def __init__(self) -> None:
        self._store: Any = None
        self._threads: dict[str, threading.Thread] = {}
        self._groups: list[dist.ProcessGroup] = []
        self._errors: dict[str, str] = {}

    def open(
        self, meta: WeightMeta, replicas: list[str], settings: TransferSettings
    ) -> dict[str, dict[str, Any]]:
        """Wait for every replica in a thread of its own and send it all buckets."""
        host = settings.options.get("host", DEFAULT_HOST)
        device = self.library.device_of(settings.options)
        if self._store is None:
            self._store = open_store(host)
        data = torch.from_numpy(map_segment(meta, writable=True))
        push = uuid4().hex
        self._errors.clear()
        for name in replicas:
            arguments = (name, f"{push}/{name}", data, meta, settings, device)
            self._threads[name] = threading.Thread(target=self._send, args=arguments, daemon=True)
            self._threads[name].start()
        shared = {
            "host": host,
            "port": self._store.port,
            "place": "" if device is None else self.library.place(device),
        }
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
        # Not before: what has left here may still be on its way through memory of this end's.
        while self._groups:
            self.library.end(self._groups.pop())
        if self._errors:
            raise WeightTransferError("; ".join(f"{n}: {e}" for n, e in self._errors.items()))

    def _send(
        self,
        name: str,
        prefix: str,
        data: torch.Tensor,
        meta: WeightMeta,
        settings: TransferSettings,
        device: torch.device | None,
    ) -> None:
        try:
            store = _torch.PrefixStore(prefix, self._store)
            deadline_s = settings.bucket_deadline_s
            group = self.library.new_group(store, 0, settings.options, deadline_s)
            self._groups.append(group)
            works: list[tuple[Any, torch.Tensor]] = []
            for bucket in split_buckets(meta.num_bytes, settings.bucket_bytes):
                piece = data[bucket.start : bucket.end]
                if device is not None:
                    piece = piece.to(device, copy=True)
                # With its work, so that its memory lasts as long.
                works.append((group.send([piece], 1, bucket.index), piece))
                if len(works) > IN_FLIGHT:
                    works.pop(0)[0].wait()
            for work, _ in works:
                work.wait()
        except RuntimeError as error:  # all that torch's libraries raise
            self._errors[name] = _first_line(error)


class PairReceiver:
    """The receiving rank of a pair; runs in the replica."""

    library: PairLibrary
    """Of the subclass."""

    def receive(self, meta: WeightMeta, buffer: WeightBuffer) -> Iterator[Bucket]:
        """Fill `buffer` from the sender.

        Raises:
            WeightSyncError: both ends are one device, or this one has none.
            WeightTransferError: the sender died or stalled.
        """
        transport, library = meta.transport, self.library
        device = library.device_of({})
        if device is not None and library.place(device) == transport["place"]:
            raise WeightSyncError(
                f"weight version {meta.version}: sender and replica are both on "
                f"{transport['place']}, and {library.name} joins no device with itself; set "
                "checkpoint_engine.backend to shm, or engine_kwargs.nccl.device to another"
            )
        group: dist.ProcessGroup | None = None
        is_whole = False
        try:
            group = self._join(transport)
            yield from self._receive(group, meta, buffer, device)
            is_whole = True
        except RuntimeError as error:  # all that torch's libraries raise
            if isinstance(error, WeightTransferError):
                raise
            raise WeightTransferError(
                f"weight version {meta.version}: {library.name}'s sender (pid "
                f"{transport['sender_pid']}) died or stalled: {_first_line(error)}"
            ) from error
        finally:
            if not is_whole:
                # What is on its way may still arrive, and must not find weights that are in use.
                buffer.discard()
            if group is not None:
                library.end(group)

    def _join(self, transport: Options) -> dist.ProcessGroup:
        deadline_s = transport["bucket_deadline_s"]
        store = _torch.TCPStore(
            transport["host"],
            transport["port"],
            is_master=False,
            timeout=timedelta(seconds=deadline_s),
        )
        store = _torch.PrefixStore(transport["prefix"], store)
        return self.library.new_group(store, 1, transport, deadline_s)

    def _receive(
        self,
        group: dist.ProcessGroup,
        meta: WeightMeta,
        buffer: WeightBuffer,
        device: torch.device | None,
    ) -> Iterator[Bucket]:
        target = torch.from_numpy(buffer.data)
        coming: list[tuple[Bucket, torch.Tensor, Any]] = []

        def arrived() -> Bucket:
            bucket, piece, work = coming.pop(0)
            work.wait()
            if device is not None:
                target[bucket.start : bucket.end].copy_(piece)
            buffer.filled(bucket)
            return bucket

        for bucket in split_buckets(meta.num_bytes, meta.transport["bucket_bytes"]):
            piece = target[bucket.start : bucket.end]
            if device is not None:
                piece = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
            coming.append((bucket, piece, group.recv([piece], 0, bucket.index)))
            if len(coming) > IN_FLIGHT:
                yield arrived()
        while coming:
            yield arrived()


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
