"""Engine `shm`: processes of one host copy the trainer's segment out of shared memory, in buckets.

Every byte is copied once by the trainer, which casts it into the segment, and once by each replica,
into the memory that it will serve from. The segment is the only buffer between them, so no process
stands in between whose death or hang could cost anything: whoever calls `push` moves no bytes. What
is doubled is each replica's own memory: the set in use, and the one that is being filled.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

from rlcore.checkpoint_engine.base import (
    CHECKPOINT_ENGINES,
    WEIGHT_RECEIVERS,
    Outcome,
    Replica,
    TransferSettings,
    load_each,
)
from rlcore.checkpoint_engine.buffer import Bucket, WeightBuffer, split_buckets
from rlcore.checkpoint_engine.segment import map_segment
from rlcore.errors import WeightTransferError
from rlcore.types import CallKey, WeightMeta


@CHECKPOINT_ENGINES.register("shm")
class ShmCheckpointEngine:
    """Tells every replica which segment to copy, and in pieces of what size."""

    def __init__(self, settings: TransferSettings) -> None:
        self._settings = settings

    def push(
        self, key: CallKey, meta: WeightMeta, replicas: Mapping[str, Replica]
    ) -> dict[str, Outcome]:
        """Load `meta` in every replica and return by name how it went."""
        meta = replace(meta, transport=self._settings.transport("shm"))
        return load_each(key, dict.fromkeys(replicas, meta), replicas)


@WEIGHT_RECEIVERS.register("shm")
class ShmReceiver:
    """Copies the segment bucket by bucket, each hashed while the cache holds it."""

    def receive(self, meta: WeightMeta, buffer: WeightBuffer) -> Iterator[Bucket]:
        """Fill `buffer` from the segment.

        Raises:
            WeightSyncError: the segment is missing or too short.
            WeightTransferError: a bucket took longer than its deadline.
        """
        source = map_segment(meta)
        deadline_s = meta.transport["bucket_deadline_s"]
        for bucket in split_buckets(meta.num_bytes, meta.transport["bucket_bytes"]):
            began = time.monotonic()
            buffer.copy(source, bucket)
            took_s = time.monotonic() - began
            if took_s > deadline_s:
                raise WeightTransferError(
                    f"weight version {meta.version}: bucket {bucket.index} of {bucket.num_bytes} "
                    f"bytes took {took_s:.1f} s, allowed are {deadline_s:g} s"
                )
            yield bucket
