"""ReplayBuffer: how a step gets its batch (verl's name and signature).

A custom sampler (`trainer.v1.sampler.custom_sampler`) is a subclass that overrides `sample`. The
state is the ledger's; this object is a plain client of it and travels with the trainer's copy.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from rlcore.buffer.transfer_queue import attached_queue
from rlcore.errors import DeadlineExceededError, RolloutError
from rlcore.types import CallKey, SampledBatch

logger = logging.getLogger(__name__)

REQUIRED_COLUMNS = ("prompts", "responses", "response_mask")
"""What a whole row has at least."""

RefillFn = Callable[[int], object]
"""Feeds so many further prompts to the ledger."""


class BatchSource(Protocol):
    """What the buffer needs of the ledger (LedgerClient has it)."""

    def wait_sample(
        self, key: CallKey, partition_id: str, batch_size: int, deadline_s: float
    ) -> SampledBatch | None:
        """Return a batch, or None when `needs_refill` prompts must be fed first."""
        ...

    def needs_refill(self, partition_id: str) -> int:
        """Return how many prompts replace groups that were given up."""
        ...

    def return_to_pending(self, key: CallKey, uids: Sequence[str]) -> None:
        """Run groups again whose rows are lost."""
        ...


class RowLookup(Protocol):
    """What the buffer needs of the queue (QueueClient has it)."""

    def incomplete(
        self, partition_id: str, keys: Sequence[str], columns: Sequence[str]
    ) -> list[str]:
        """Return those of `keys` that are unknown or lack a column."""
        ...


class ReplayBuffer:
    """Leases batches of finished prompts, oldest first.

    Example:
        >>> buffer = ReplayBuffer(ledger, run_id="run-1", attempt=1, refill_fn=feed_more)
        >>> batch, metrics = buffer.sample(global_steps=3, partition_id="train", batch_size=8)
    """

    def __init__(
        self,
        ledger: BatchSource,
        *,
        run_id: str,
        attempt: int,
        deadline_s: float = 1800.0,
        refill_fn: RefillFn | None = None,
        rows: RowLookup | None = None,
    ) -> None:
        """Keep what every `sample` needs.

        Args:
            ledger: Gives the batches.
            run_id: Prefix of partition names.
            attempt: The fencing token.
            deadline_s: How long `sample` waits.
            refill_fn: Called with the number of prompts to feed in place of failed groups.
            rows: Looks rows up; None takes this process's queue client.
        """
        self.ledger = ledger
        self.run_id = run_id
        self.attempt = attempt
        self.deadline_s = deadline_s
        self.refill_fn = refill_fn
        self._rows = rows

    def sample(
        self,
        global_steps: int,
        partition_id: str,
        batch_size: int,
        *,
        key: CallKey | None = None,
        deadline_s: float | None = None,
        refill_fn: RefillFn | None = None,
    ) -> tuple[SampledBatch, dict[str, float]]:
        """Wait for `batch_size` finished groups and lease them; again returns the same ones.

        Failed groups are replaced while it waits. Groups whose rows are gone from the queue (it is
        a cache) are run again.

        Args:
            global_steps: The step, from 1.
            partition_id: `train` or `val`, with or without the run's prefix.
            batch_size: Prompts.
            key: Who calls; None makes one without inner step and try.
            deadline_s: Instead of the constructor's.
            refill_fn: Instead of the constructor's.

        Raises:
            DeadlineExceededError: overdue; names uids, states, ages and owners.
            RolloutError: groups failed and nothing refills them.
            TooManyFailuresError: too large a share of sessions failed.
            FencedError: an older caller.
        """
        key = key or CallKey(
            run_id=self.run_id, attempt=self.attempt, global_step=global_steps, phase="sample_batch"
        )
        partition_id = self.full_partition(partition_id)
        limit_s = self.deadline_s if deadline_s is None else deadline_s
        began = time.monotonic()
        num_refilled = num_returned = 0
        while True:
            left_s = began + limit_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceededError(
                    f"{key} waited {limit_s:g} s for {batch_size} prompts of {partition_id}; "
                    f"{num_refilled} prompts were refilled and {num_returned} run again meanwhile"
                )
            batch = self.ledger.wait_sample(key, partition_id, batch_size, left_s)
            if batch is None:
                num_refilled += self._refill(partition_id, refill_fn or self.refill_fn)
                continue
            lost = self._lost_groups(partition_id, batch)
            if not lost:
                break
            logger.warning(
                "the rows of %d groups are gone; they are run again: %s", len(lost), lost
            )
            num_returned += len(lost)
            self.ledger.return_to_pending(key, lost)
        metrics = {
            **batch.metrics,
            "rollout/refilled_prompts": float(num_refilled),
            "rollout/returned_prompts": float(num_returned),
            "rollout/sample_wait_s": time.monotonic() - began,
        }
        return batch, metrics

    def full_partition(self, partition_id: str) -> str:
        """Return the partition's name with the run's prefix (verl says `train` and `val`)."""
        prefix = f"{self.run_id}/"
        return partition_id if partition_id.startswith(prefix) else prefix + partition_id

    def _refill(self, partition_id: str, refill_fn: RefillFn | None) -> int:
        count = self.ledger.needs_refill(partition_id)
        if refill_fn is None:
            raise RolloutError(
                f"{count} groups of {partition_id} failed and nothing refills them (no refill_fn)"
            )
        logger.warning("%d groups of %s failed; as many prompts are fed", count, partition_id)
        refill_fn(count)
        if count and self.ledger.needs_refill(partition_id) >= count:
            raise RolloutError(f"refill_fn was asked for {count} prompts and fed no new one")
        return count

    def _lost_groups(self, partition_id: str, batch: SampledBatch) -> list[str]:
        rows = self._rows or attached_queue()
        missing = set(rows.incomplete(partition_id, batch.keys, REQUIRED_COLUMNS))
        of_row = zip(batch.keys, batch.tags, strict=True)
        lost = {tag["uid"] for row_key, tag in of_row if row_key in missing}
        return [uid for uid in batch.uids if uid in lost]
