"""Engine `mooncake`: replicas read the trainer's segment by Mooncake's TransferEngine.

The sending child registers the segment and waits; every replica reads bucket by bucket into its own
memory, TCP on hosts without RDMA. Both sides find each other by the address in
`WeightMeta.transport`: no metadata server. Only here is the package `mooncake` imported.
"""

import contextlib
import importlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rlcore.checkpoint_engine.base import (
    CHECKPOINT_ENGINES,
    WEIGHT_RECEIVERS,
    Outcome,
    Replica,
    TransferSettings,
)
from rlcore.checkpoint_engine.buffer import Bucket, Bytes, WeightBuffer, split_buckets
from rlcore.checkpoint_engine.segment import map_segment
from rlcore.checkpoint_engine.sender import push_through_child
from rlcore.errors import ConfigError, WeightTransferError
from rlcore.types import CallKey, WeightMeta

DEFAULT_HOST = "127.0.0.1"
IN_FLIGHT = 2
"""Buckets that are on their way at a time. An engine that gets 4,096 slices at once jams its peer
for ever; it holds 512."""
POLL_S = 0.0002
"""The library can be asked and does not call back."""


@CHECKPOINT_ENGINES.register("mooncake")
class MooncakeCheckpointEngine:
    """Offers the segment from a child process of the caller; every replica reads it.

    Options: `host`, the address of the sender's host that replicas can reach; `protocol`, tcp (the
    default) or rdma; `device`, the network device for rdma.
    """

    def __init__(self, settings: TransferSettings) -> None:
        """Take the settings.

        Raises:
            ConfigError: the package is not there.
        """
        self._settings = settings
        require_package()

    def push(
        self, key: CallKey, meta: WeightMeta, replicas: Mapping[str, Replica]
    ) -> dict[str, Outcome]:
        """Load `meta` in every replica and return by name how it went.

        Raises:
            WeightTransferError: the sending process failed, died or does not answer.
        """
        return push_through_child("mooncake", self._settings, key, meta, replicas)


class MooncakeSender:
    """Holds the segment registered; runs in the child."""

    def __init__(self) -> None:
        self._engine: Any = None
        self._registered: Bytes | None = None

    def open(
        self, meta: WeightMeta, replicas: list[str], settings: TransferSettings
    ) -> dict[str, dict[str, Any]]:
        """Register the segment and say where it is."""
        options = settings.options
        if self._engine is None:
            self._engine = new_engine(options)
        data = map_segment(meta)
        self._release()
        if meta.num_bytes:
            register(self._engine, data)
            self._registered = data
        host = options.get("host", DEFAULT_HOST)
        found = {
            "session": f"{host}:{self._engine.get_rpc_port()}",
            "address": data.ctypes.data,
            "options": {k: v for k, v in options.items() if k != "host"},
        }
        return dict.fromkeys(replicas, found)

    def close(self, deadline_s: float) -> None:
        """Take the segment back: all have read it."""
        self._release()

    def _release(self) -> None:
        if self._registered is not None:
            self._engine.unregister_memory(self._registered.ctypes.data)
            self._registered = None


@WEIGHT_RECEIVERS.register("mooncake")
class MooncakeReceiver:
    """Reads a segment of another process; runs in the replica."""

    def __init__(self) -> None:
        self._engine: Any = None

    def receive(self, meta: WeightMeta, buffer: WeightBuffer) -> Iterator[Bucket]:
        """Fill `buffer` from the sender.

        Raises:
            WeightTransferError: the sender died or stalled.
        """
        if not meta.num_bytes:
            return
        if self._engine is None:
            self._engine = new_engine(meta.transport["options"])
        register(self._engine, buffer.data)
        is_whole = False
        try:
            yield from self._read(meta, buffer)
            is_whole = True
        finally:
            if is_whole:
                self._engine.unregister_memory(buffer.data.ctypes.data)
            else:
                # A read that is on its way may still end, and must not find weights that are in
                # use; nor does an engine that failed once recover.
                buffer.discard()
                self._engine = None

    def _read(self, meta: WeightMeta, buffer: WeightBuffer) -> Iterator[Bucket]:
        transport = meta.transport
        coming: list[tuple[Bucket, int]] = []
        for bucket in split_buckets(meta.num_bytes, transport["bucket_bytes"]):
            batch = self._engine.batch_transfer_async_read(
                transport["session"],
                [buffer.data.ctypes.data + bucket.start],
                [transport["address"] + bucket.start],
                [bucket.num_bytes],
            )
            if not batch:
                raise WeightTransferError(_message(meta, bucket, "cannot be asked for"))
            coming.append((bucket, batch))
            if len(coming) > IN_FLIGHT:
                yield self._arrived(meta, buffer, *coming.pop(0))
        while coming:
            yield self._arrived(meta, buffer, *coming.pop(0))

    def _arrived(
        self, meta: WeightMeta, buffer: WeightBuffer, bucket: Bucket, batch: int
    ) -> Bucket:
        ends = time.monotonic() + meta.transport["bucket_deadline_s"]
        while (status := self._engine.transfer_check_status(batch)) == 0:
            if time.monotonic() > ends:
                raise WeightTransferError(_message(meta, bucket, "is overdue"))
            time.sleep(POLL_S)
        if status < 0:
            raise WeightTransferError(_message(meta, bucket, f"failed ({status})"))
        buffer.filled(bucket)
        return bucket


def new_engine(options: Mapping[str, Any]) -> Any:
    """Return an engine of this process on a port of its own.

    Raises:
        ConfigError: the package is not there.
        WeightTransferError: the engine does not start.
    """
    engine = require_package().TransferEngine()
    host, protocol = options.get("host", DEFAULT_HOST), options.get("protocol", "tcp")
    with _quiet():
        code = engine.initialize(host, "P2PHANDSHAKE", protocol, options.get("device", ""))
    if code:
        raise WeightTransferError(f"mooncake's engine does not start on {host} ({code})")
    return engine


def require_package() -> Any:
    """Return the library's module.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise ConfigError(
            f"checkpoint_engine.backend=mooncake: the package cannot be imported ({error}); "
            "install mooncake-transfer-engine (without CUDA: mooncake-transfer-engine-non-cuda) "
            "and the system's libibverbs1"
        ) from error


def register(engine: Any, data: Bytes) -> None:
    """Let an engine use memory.

    Raises:
        WeightTransferError: it refuses.
    """
    code = engine.register_memory(data.ctypes.data, data.nbytes)
    if code:
        raise WeightTransferError(f"mooncake cannot register {data.nbytes} bytes ({code})")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library's start-up messages off stderr; its errors come later and are kept."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _message(meta: WeightMeta, bucket: Bucket, how: str) -> str:
    return (
        f"weight version {meta.version}: bucket {bucket.index} ({bucket.num_bytes} bytes) from "
        f"mooncake's sender (pid {meta.transport['sender_pid']}) {how}"
    )
