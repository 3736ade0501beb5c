"""ReplayBuffer: how a step gets its batch (verl's name, signature and attributes).

A custom sampler (`trainer.v1.sampler.custom_sampler`) is a subclass that overrides `sample`: it may
choose among what `super().sample(...)` proposes, or by itself from the views below. What it returns
is leased to the step; what it saw and left stays waiting. The state is the ledger's; this object is
a plain client of it and travels with the trainer's copy.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlcore.buffer.policy import SamplePolicy
from rlcore.buffer.transfer_queue import attached_queue
from rlcore.buffer.views import PartitionViews
from rlcore.errors import DataError, DeadlineExceededError, RolloutError
from rlcore.types import CallKey, SampledBatch

logger = logging.getLogger(__name__)

REQUIRED_COLUMNS = ("prompts", "responses", "response_mask")
"""What a whole row has at least."""

MOST_QUARANTINED = 1_000
"""Prompts in a row that may be of quarantined rows before the run ends."""

RefillFn = Callable[[int], object]
"""Feeds so many further prompts to the ledger."""


class BatchSource(Protocol):
    """What the buffer needs of the ledger (LedgerClient has it)."""

    def wait_sample(
        self,
        key: CallKey,
        partition_id: str,
        batch_size: int,
        deadline_s: float,
        policy: SamplePolicy,
        *,
        lease: bool,
    ) -> SampledBatch | None:
        """Return a batch, or None when `needs_refill` prompts must be fed first."""
        ...

    def lease(
        self, key: CallKey, partition_id: str, uids: Sequence[str], policy: SamplePolicy
    ) -> SampledBatch:
        """Lease chosen groups."""
        ...

    def lease_of(self, key: CallKey, partition_id: str) -> SampledBatch | None:
        """Return what is leased to the key's step."""
        ...

    def needs_refill(self, partition_id: str, policy: SamplePolicy) -> int:
        """Return how many prompts replace groups that were evicted."""
        ...

    def counts(self, partition_id: str) -> dict[str, int]:
        """Return how many prompts were fed, and are in each state."""
        ...

    def return_to_pending(self, key: CallKey, uids: Sequence[str]) -> None:
        """Run groups again whose rows are lost."""
        ...

    def view(self, partition_id: str) -> dict[str, Any]:
        """Return uids per status and the tags of stored rows."""
        ...


class RowLookup(Protocol):
    """What the buffer needs of the queue (QueueClient has it)."""

    def incomplete(
        self, partition_id: str, keys: Sequence[str], columns: Sequence[str]
    ) -> list[str]:
        """Return those of `keys` that are unknown or lack a column."""
        ...


@dataclass(kw_only=True, slots=True)
class _Call:
    """What one `sample` has to keep to, and what happened meanwhile."""

    key: CallKey
    began: float
    limit_s: float
    refill_fn: RefillFn | None
    lease: bool
    num_refilled: int = 0
    num_returned: int = 0
    num_quarantined: int = 0
    """Refilled in a row of which none was run: all are of quarantined rows."""

    def left_s(self, what: str) -> float:
        """Return the seconds that are left.

        Raises:
            DeadlineExceededError: none are.
        """
        left_s = self.began + self.limit_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceededError(
                f"{self.key} waited {self.limit_s:g} s for {what}; {self.num_refilled} prompts "
                f"were refilled and {self.num_returned} run again meanwhile"
            )
        return left_s


class ReplayBuffer(PartitionViews):
    """Leases batches of finished prompts, oldest first.

    Example:
        >>> buffer = ReplayBuffer(ledger, run_id="run-1", attempt=1, refill_fn=feed_more)
        >>> batch, metrics = buffer.sample(global_steps=3, partition_id="train", batch_size=8)

    Attributes:
        trainer_mode, trainer_config, max_off_policy_threshold, max_off_policy_strategy,
        sampler_kwargs: As configured (verl's names).
        policy: What the threshold, the strategy and the mode come to; a step may replace it.
    """

    def __init__(  # noqa: PLR0913  verl's keywords
        self,
        ledger: BatchSource,
        *,
        run_id: str,
        attempt: int,
        deadline_s: float = 1800.0,
        refill_fn: RefillFn | None = None,
        rows: RowLookup | None = None,
        policy: SamplePolicy | None = None,
        trainer_mode: str = "sync",
        trainer_config: Any = None,
        sampler_kwargs: dict[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        """Keep what every `sample` needs.

        Args:
            ledger: Gives the batches.
            run_id: Prefix of partition names.
            attempt: The fencing token.
            deadline_s: How long `sample` waits.
            refill_fn: Called with the number of prompts to feed in place of evicted groups.
            rows: Looks rows up; None takes this process's queue client.
            policy: Staleness and filter; None has neither.
            trainer_mode: Name of the mode.
            trainer_config: The configuration's section `trainer`.
            sampler_kwargs: `trainer.v1.sampler.sampler_kwargs`, for subclasses.
            unknown: Refused, by name.

        Raises:
            DataError: an argument that nobody knows.
        """
        if unknown:
            raise DataError(f"{type(self).__name__} takes no {', '.join(sorted(unknown))}")
        self.ledger = ledger
        self.run_id = run_id
        self.attempt = attempt
        self.deadline_s = deadline_s
        self.refill_fn = refill_fn
        self.policy = policy or SamplePolicy()
        self.trainer_mode = trainer_mode
        self.trainer_config = trainer_config
        self.sampler_kwargs = dict(sampler_kwargs or {})
        self._rows = rows
        self._call: _Call | None = None

    @property
    def max_off_policy_threshold(self) -> int | None:
        """Steps or weight versions that a group may span; None: no limit."""
        return self.policy.max_off_policy_threshold

    @property
    def max_off_policy_strategy(self) -> str:
        """What happens to groups that would span more."""
        return self.policy.strategy

    def state_dict(self) -> dict[str, Any]:
        """Return what a sampler of the user's remembers from step to step: JSON values.

        A phase runs on a copy of the trainer, so that other attributes are lost. It is in every
        checkpoint.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned after the step before; empty before the first."""

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
        """Wait for `batch_size` finished groups and return the oldest; again: the same ones.

        Called by the trainer they are leased; called by a subclass's `sample` they are proposed,
        and what that one returns is leased. Evicted groups are replaced while it waits. Groups
        whose rows are gone from the queue (it is a cache) are run again.

        Args:
            global_steps: The step, from 1.
            partition_id: `train` or `val`, with or without the run's prefix.
            batch_size: Prompts.
            key: Who calls; None makes one without inner step and try.
            deadline_s: Instead of the constructor's.
            refill_fn: Instead of the constructor's.

        Raises:
            DeadlineExceededError: overdue; names uids, states, ages and owners.
            RolloutError: groups were evicted and nothing refills them.
            TooManyFailuresError: too large a share of sessions failed.
            FencedError: an older caller.
        """
        call = self._call or self._new_call(
            key or self._key(global_steps), deadline_s, refill_fn, lease=True
        )
        partition_id = self.full_partition(partition_id)
        waited_for = f"{batch_size} prompts of {partition_id}"
        while True:
            batch = self.ledger.wait_sample(
                call.key, partition_id, batch_size, call.left_s(waited_for), self.policy,
                lease=call.lease,
            )  # fmt: skip
            if batch is None:
                self._refill(call, partition_id)
            elif not self._returned_lost(call, partition_id, batch):
                self._forget_view()
                return batch, self._metrics(call, batch)

    def draw(
        self,
        key: CallKey,
        partition_id: str,
        batch_size: int,
        *,
        deadline_s: float,
        refill_fn: RefillFn | None = None,
    ) -> tuple[SampledBatch, dict[str, float]]:
        """Lease the batch of an inner step by way of `sample`, whoever wrote that.

        Args:
            key: Names step, inner step and try.
            partition_id: `train` or `val`.
            batch_size: Prompts.
            deadline_s: Seconds for everything.
            refill_fn: Feeds prompts in place of evicted groups.

        Raises:
            DataError: a custom sampler returned no batch of whole, finished groups.
            DeadlineExceededError, RolloutError, TooManyFailuresError, FencedError: see `sample`.
        """
        full = self.full_partition(partition_id)
        is_own = type(self).sample is ReplayBuffer.sample
        call = self._new_call(key, deadline_s, refill_fn, lease=is_own)
        self._call = call
        self.refill_fn, kept = call.refill_fn, self.refill_fn
        try:
            while True:
                known = self.ledger.lease_of(key, full)
                if known is not None and not self._returned_lost(call, full, known):
                    return known, self._metrics(call, known)
                batch, metrics = self.sample(key.global_step, partition_id, batch_size)
                if is_own:
                    return batch, metrics
                uids = self._groups_of(batch, full, batch_size)
                leased = self.ledger.lease(key, full, uids, self.policy)
                if not self._returned_lost(call, full, leased):
                    return leased, {**self._metrics(call, leased), **metrics}
                call.left_s(f"{batch_size} prompts of {full}")
        finally:
            self._call, self.refill_fn = None, kept

    def full_partition(self, partition_id: str) -> str:
        """Return the partition's name with the run's prefix (verl says `train` and `val`)."""
        prefix = f"{self.run_id}/"
        return partition_id if partition_id.startswith(prefix) else prefix + partition_id

    def _key(self, global_steps: int) -> CallKey:
        return CallKey(
            run_id=self.run_id, attempt=self.attempt, global_step=global_steps, phase="sample_batch"
        )

    def _new_call(
        self, key: CallKey, deadline_s: float | None, refill_fn: RefillFn | None, *, lease: bool
    ) -> _Call:
        return _Call(
            key=key,
            began=time.monotonic(),
            limit_s=self.deadline_s if deadline_s is None else deadline_s,
            refill_fn=refill_fn or self.refill_fn,
            lease=lease,
        )

    def _metrics(self, call: _Call, batch: SampledBatch) -> dict[str, float]:
        return {
            **batch.metrics,
            "rollout/refilled_prompts": float(call.num_refilled),
            "rollout/returned_prompts": float(call.num_returned),
            "rollout/sample_wait_s": time.monotonic() - call.began,
        }

    def _refill(self, call: _Call, partition_id: str) -> None:
        count = self.ledger.needs_refill(partition_id, self.policy)
        if not count:
            return
        if call.refill_fn is None:
            raise RolloutError(
                f"{count} groups of {partition_id} failed or were evicted and nothing refills them "
                "(no refill_fn)"
            )
        logger.info("%d groups of %s were evicted; as many prompts are fed", count, partition_id)
        before = self.ledger.counts(partition_id)
        call.refill_fn(count)
        after = self.ledger.counts(partition_id)
        fed, failed = (after[name] - before[name] for name in ("fed", "failed"))
        if not fed:
            raise RolloutError(f"refill_fn was asked for {count} prompts and fed no new one")
        # As many may be owed as before: other groups were evicted meanwhile.
        # What is fed of a quarantined row has failed at once; else groups fail in `sample` only.
        call.num_quarantined = call.num_quarantined + fed if failed >= fed else 0
        if call.num_quarantined >= MOST_QUARANTINED:
            raise RolloutError(
                f"the last {call.num_quarantined} prompts that were fed to {partition_id} are of "
                "rows that are quarantined because they failed again and again"
            )
        call.num_refilled += count

    def _returned_lost(self, call: _Call, partition_id: str, batch: SampledBatch) -> bool:
        """Send groups whose rows are gone back to be run again; return whether there were any."""
        rows = self._rows or attached_queue()
        missing = set(rows.incomplete(partition_id, batch.keys, REQUIRED_COLUMNS))
        of_row = zip(batch.keys, batch.tags, strict=True)
        gone = {tag["uid"] for row_key, tag in of_row if row_key in missing}
        lost = [uid for uid in batch.uids if uid in gone]
        if lost:
            logger.warning("the rows of %d groups are gone; they run again: %s", len(lost), lost)
            call.num_returned += len(lost)
            self.ledger.return_to_pending(call.key, lost)
        return bool(lost)

    def _groups_of(self, batch: Any, partition_id: str, batch_size: int) -> list[str]:
        """Return the uids of a batch that a custom sampler returned, in its order.

        Raises:
            DataError: it is not `batch_size` whole groups.
        """
        name = type(self).__name__
        keys = getattr(batch, "keys", None)
        if keys is None or callable(keys):
            raise DataError(
                f"{name}.sample returned {type(batch).__name__}; it must return (batch, metrics) "
                "with batch.keys, the keys of the rows"
            )
        given = [str(key) for key in keys]
        uids = list(dict.fromkeys(key.split("_")[0] for key in given))
        if len(uids) != batch_size:
            raise DataError(
                f"{name}.sample returned {len(uids)} groups, asked for {batch_size} of "
                f"{partition_id}"
            )
        chosen = set(uids)
        stored = self.ledger.view(partition_id)["rows"]
        whole = {row for row in stored if row.split("_")[0] in chosen}
        missing = sorted(whole - set(given))
        if missing:
            raise DataError(
                f"{name}.sample left out rows of groups that it returned: {missing[:8]}; a group "
                "is sampled whole"
            )
        return uids
