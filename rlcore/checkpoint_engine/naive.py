"""Engine `naive`: replicas of the trainer's host read the trainer's segment themselves."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlcore.checkpoint_engine.base import CHECKPOINT_ENGINES, Acknowledgement, Replica
from rlcore.types import CallKey, WeightMeta


@CHECKPOINT_ENGINES.register("naive")
class NaiveCheckpointEngine:
    """Tells every replica to read the segment, all at once."""

    def push(
        self, key: CallKey, meta: WeightMeta, replicas: Sequence[tuple[str, Replica]]
    ) -> list[Acknowledgement]:
        """Load `meta` in every replica and return what each has loaded.

        Raises:
            WeightSyncError, TransientError: what a replica raised.
        """
        with ThreadPoolExecutor(max_workers=max(len(replicas), 1)) as threads:
            replies = [threads.submit(r.load_weights, key, meta) for _, r in replicas]
            answers: list[dict[str, Any]] = [reply.result() for reply in replies]
        return [
            Acknowledgement(
                replica=name,
                version=answer["version"],
                num_bytes=answer["num_bytes"],
                checksum=answer["checksum"],
            )
            for (name, _), answer in zip(replicas, answers, strict=True)
        ]
