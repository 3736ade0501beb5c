"""Engine `naive`: replicas of the trainer's host read the trainer's segment themselves."""

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
from rlcore.checkpoint_engine.buffer import BLOCK_BYTES, Bucket, WeightBuffer, split_buckets
from rlcore.checkpoint_engine.segment import map_segment
from rlcore.types import CallKey, WeightMeta


@CHECKPOINT_ENGINES.register("naive")
class NaiveCheckpointEngine:
    """Tells every replica to read the segment, all at once."""

    def __init__(self, settings: TransferSettings) -> None:
        self._settings = settings

    def push(
        self, key: CallKey, meta: WeightMeta, replicas: Mapping[str, Replica]
    ) -> dict[str, Outcome]:
        """Load `meta` in every replica and return by name how it went."""
        # One piece: nothing is cut where everybody sees the whole.
        transport = self._settings.transport("naive", bucket_bytes=meta.num_bytes + BLOCK_BYTES)
        meta = replace(meta, transport=transport)
        return load_each(key, dict.fromkeys(replicas, meta), replicas)


@WEIGHT_RECEIVERS.register("naive")
class NaiveReceiver:
    """Copies the whole segment at once."""

    def receive(self, meta: WeightMeta, buffer: WeightBuffer) -> Iterator[Bucket]:
        """Fill `buffer` from the segment.

        Raises:
            WeightSyncError: the segment is missing or too short.
        """
        source = map_segment(meta)
        for bucket in split_buckets(meta.num_bytes, meta.num_bytes + BLOCK_BYTES):
            buffer.copy(source, bucket)
            yield bucket
