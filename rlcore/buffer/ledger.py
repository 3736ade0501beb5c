"""The ledger: the one truth about what became of every prompt that was ever fed.

Each method decides, writes one event to the journal, applies it, and answers. The conservation rule
holds at all times and across restarts:

    fed = pending + running + waiting + sampled + trained + stale + filtered + failed + discarded

where waiting = finished + failure not yet sampled. Plain, synchronous and not thread-safe: the Ray
actor round it (rlcore/cluster/ledger.py) calls it from one event loop and adds the waiting.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rlcore.buffer.batches import build_batch, row_tags, window_metrics
from rlcore.buffer.ledger_claims import MAX_CLAIMS, LedgerClaims
from rlcore.buffer.ledger_core import trained_event
from rlcore.buffer.ledger_state import ACTIVE, WAITING, Lease, Prompt
from rlcore.buffer.policy import SamplePolicy, is_held_back, judge
from rlcore.errors import DataError, FencedError, RolloutError
from rlcore.types import CallKey, SampledBatch, SessionRecord

__all__ = ["MAX_CLAIMS", "Ledger"]

logger = logging.getLogger(__name__)


class Ledger(LedgerClaims):
    """Feeds, claims, settles, samples and releases prompts.

    Example:
        >>> ledger = Ledger("run-1", "runs/run-1/ledger.jsonl", attempt=1)
        >>> ledger.feed(key, specs)
        >>> [spec] = ledger.claim(1, "worker-0", limit=1)
        >>> ledger.settle("worker-0", spec.uid, sessions)
        'finished'
        >>> batch = ledger.sample(key, "run-1/train", batch_size=1)
        >>> rows_to_clear = ledger.mark_trained(key, key.global_step)
    """

    def sample(
        self,
        key: CallKey,
        partition_id: str,
        batch_size: int,
        policy: SamplePolicy = SamplePolicy(),  # noqa: B008  frozen
        *,
        lease: bool = True,
    ) -> SampledBatch | None:
        """Lease the oldest finished groups to (step, inner step); asking again returns the same.

        Groups that no batch may have (too few good sessions, stale, filtered) are evicted first;
        see `needs_refill`. Validation groups are never evicted: their failed sessions are simply
        not in the batch.

        Args:
            key: Names step and inner step.
            partition_id: Of the run.
            batch_size: Prompts.
            policy: Staleness, filter, and what evicted groups are replaced by.
            lease: Off: only propose the batch, which then has no lease id.

        Returns:
            None while fewer than `batch_size` groups are ready, or others must come first.

        Raises:
            DataError: the batch of this step was sampled with another size, or a group lacks the
                metric that it is filtered by.
            FencedError: an older caller, or a step that is trained.
            TooManyFailuresError: more than `max_failure_ratio` of the sessions failed.
            RolloutError: the queue is full of groups that make no batch.
        """
        known = self.lease_of(key, partition_id)
        if known is not None:
            self._check_size(known, batch_size)
            return known
        partition = self._state.partition(partition_id)
        self._check_failure_ratio(partition_id, batch_size)
        if partition.validate:
            ready = self._held("finished", partition_id) + self._held("failure", partition_id)
            ready.sort(key=lambda prompt: (prompt.global_step, prompt.order))
        else:
            self._evict(key, partition_id, policy)
            ready = self._state.queue("finished", partition_id).first(batch_size)
        if len(ready) < batch_size:
            self._check_room(partition_id, batch_size)
            return None
        chosen = ready[:batch_size]
        if not partition.validate and self._comes_too_early(key, partition_id, chosen, policy):
            return None
        if lease:
            return self._lease(key, partition_id, chosen, policy)
        return build_batch(self._new_lease(key, partition_id, chosen, ""), chosen)

    def lease(
        self,
        key: CallKey,
        partition_id: str,
        uids: Sequence[str],
        policy: SamplePolicy = SamplePolicy(),  # noqa: B008  frozen
    ) -> SampledBatch:
        """Lease chosen groups to (step, inner step), for a sampler of the user's.

        What is leased already to that place is returned as it is. All other groups stay where they
        are.

        Raises:
            DataError: a uid is unknown, given twice, or not finished.
            FencedError: an older caller, or a step that is trained.
        """
        known = self.lease_of(key, partition_id)
        if known is not None:
            return known
        if len(set(uids)) != len(uids):
            raise DataError(f"{key} leases a prompt twice: {sorted(uids)}")
        chosen: list[Prompt] = []
        for uid in uids:
            prompt = self._state.prompts.get(uid)
            if prompt is None or prompt.partition_id != partition_id or prompt.status != "finished":
                found = "was never fed" if prompt is None else f"is {prompt.status}"
                raise DataError(
                    f"{key} leases prompt {uid}, which {found}: a sampler may return finished "
                    f"groups of {partition_id} only"
                )
            chosen.append(prompt)
        return self._lease(key, partition_id, chosen, policy)

    def lease_of(self, key: CallKey, partition_id: str) -> SampledBatch | None:
        """Return what is leased to (step, inner step); None before it is sampled.

        Raises:
            FencedError: an older caller, or a training step that is trained.
        """
        self._admit(key)
        lease = self._state.leases.get(_lease_id(key, partition_id))
        if lease is not None:
            return self._batch(lease)
        is_training = not self._state.partition(partition_id).validate
        if key.global_step <= self._state.trained_step and is_training:
            raise FencedError(f"{key} samples for a step that is trained and released")
        return None

    def leased(self, lease_id: str) -> SampledBatch:
        """Return a sampled batch that is not yet trained.

        Raises:
            DataError: there is no such lease.
        """
        lease = self._state.leases.get(lease_id)
        if lease is None:
            raise DataError(f"no batch is leased as {lease_id}; leased: {list(self._state.leases)}")
        return self._batch(lease)

    def needs_refill(
        self,
        partition_id: str,
        policy: SamplePolicy = SamplePolicy(),  # noqa: B008  frozen
    ) -> int:
        """Return how many prompts must be fed to replace evicted groups.

        With `policy.max_in_flight` not more than keep that many pending and running. Where the
        surplus is discarded, none once a step's prompts are finished: what is in flight drains.
        """
        owed = self._state.partition(partition_id).num_owed
        finished = self._state.partition(partition_id).counts["finished"]
        if policy.discards_surplus and 0 < policy.prompts_per_step <= finished:
            return 0
        if policy.max_in_flight is None:
            return owed
        counts = self._state.partition(partition_id).counts
        return max(0, min(owed, policy.max_in_flight - counts["pending"] - counts["running"]))

    def view(self, partition_id: str) -> dict[str, Any]:
        """Return what a sampler may look at: uids per status, and the tag of every stored row."""
        prompts = [p for status in sorted(ACTIVE) for p in self._held(status, partition_id)]
        found: dict[str, Any] = {status: [] for status in ("pending", "running", *sorted(WAITING))}
        rows: dict[str, dict[str, Any]] = {}
        for prompt in prompts:
            if prompt.status == "sampled":
                continue
            found[prompt.status].append(prompt.uid)
            rows |= {tag["key"]: tag for tag in row_tags(prompt)}
        return {**found, "rows": rows}

    def mark_trained(self, key: CallKey, global_step: int) -> list[str]:
        """Release the training batches up to `global_step`; return their row keys, to be cleared.

        A repeat returns the same keys, for a caller that died before it cleared them.

        Raises:
            DataError: nothing is leased to that step.
            FencedError: an older caller.
        """
        self._admit(key)
        if global_step <= self._state.trained_step:
            return list(self._state.trained_keys) if global_step == self._state.trained_step else []
        event = trained_event(self._state, global_step)
        if not event["lease_ids"]:
            raise DataError(f"no training batch is leased to step {global_step}")
        self._record(event)
        return list(self._state.trained_keys)

    def settled(self, partition_id: str) -> dict[str, list[SessionRecord]] | None:
        """Return per prompt that waits how its sessions ended, failed ones included, as fed.

        For validation, where every prompt counts.

        Returns:
            None while a prompt of the partition is pending or running.

        Raises:
            TooManyFailuresError: more than `max_failure_ratio` of the sessions failed.
        """
        if self._held("pending", partition_id) or self._held("running", partition_id):
            return None
        prompts = self._held("finished", partition_id) + self._held("failure", partition_id)
        self._check_failure_ratio(partition_id, len(prompts))
        prompts.sort(key=lambda prompt: prompt.order)
        return {prompt.uid: list(prompt.sessions) for prompt in prompts}

    def waiting_rows(self, partition_id: str) -> dict[str, list[str]]:
        """Return per group that waits to be sampled the keys of its rows (to look them up)."""
        return {prompt.uid: prompt.keys for prompt in self._held("finished", partition_id)}

    def _check_room(self, partition_id: str, batch_size: int) -> None:
        """Refuse to wait for groups that nothing can run: the queue is full without a batch.

        Raises:
            RolloutError: says how full it is and with what.
        """
        pending = self._state.queue("pending", partition_id).first(1)
        if not pending or self._fitting(pending) or self._state.with_status("running"):
            return
        counts = {name: n for name, n in self.counts(partition_id).items() if n}
        raise RolloutError(
            f"the queue is full: {self._num_stored()} of {self.capacity} rows "
            f"(transfer_queue.backend.SimpleStorage.total_storage_size) are taken, and "
            f"{partition_id} has no {batch_size} finished prompts: {counts}; raise the size to "
            f"{batch_size * pending[0].num_sessions} rows or more per batch on its way"
        )

    def _evict(self, key: CallKey, partition_id: str, policy: SamplePolicy) -> None:
        """Take out what no batch may have; each group is owed once."""
        verdicts = judge(self._state, partition_id, key.global_step, policy)
        self._state.judged(partition_id)
        for status, prompts in verdicts.items():
            if not prompts:
                continue
            event = {
                "op": "evict",
                "status": status,
                "uids": [prompt.uid for prompt in prompts],
                "spans": [policy.span_of(prompt, key.global_step) for prompt in prompts],
                "owed": policy.refill_factor if status == "filtered" else 1,
            }
            logger.info("%s: %d groups of %s are %s", key, len(prompts), partition_id, status)
            self._record(event)

    def _comes_too_early(
        self, key: CallKey, partition_id: str, chosen: Sequence[Prompt], policy: SamplePolicy
    ) -> bool:
        """Whether a full batch has to wait: for refills, older prompts, or everything in flight."""
        if policy.keeps_supply and self.needs_refill(partition_id, policy):
            return True
        if policy.discards_surplus and self._has_in_flight(partition_id):
            return True
        return is_held_back(self._state, partition_id, key.global_step, chosen, policy)

    def _has_in_flight(self, partition_id: str) -> bool:
        flying = [self._state.queue(status, partition_id) for status in ("pending", "running")]
        return any(len(prompts) for prompts in flying)

    def _new_lease(
        self, key: CallKey, partition_id: str, chosen: Sequence[Prompt], lease_id: str
    ) -> Lease:
        return Lease(
            lease_id=lease_id,
            partition_id=partition_id,
            global_step=key.global_step,
            inner_step=key.inner_step,
            batch_size=len(chosen),
            uids=[prompt.uid for prompt in chosen],
            metrics=window_metrics(self._state.partition(partition_id)),
        )

    def _lease(
        self,
        key: CallKey,
        partition_id: str,
        chosen: Sequence[Prompt],
        policy: SamplePolicy,
    ) -> SampledBatch:
        lease_id = _lease_id(key, partition_id)
        taken = {prompt.uid for prompt in chosen}
        surplus: list[Prompt] = []
        if policy.discards_surplus:
            surplus = [p for p in self._held("finished", partition_id) if p.uid not in taken]
        if surplus:
            self._record(
                {
                    "op": "evict",
                    "status": "discarded",
                    "uids": [prompt.uid for prompt in surplus],
                    "spans": [0] * len(surplus),
                    "owed": 0,
                }
            )
        lease = self._new_lease(key, partition_id, chosen, lease_id)
        settles = policy.discards_surplus
        self._record({"op": "sample", "lease": asdict(lease), "settles_debt": settles})
        return self._batch(self._state.leases[lease_id])

    def _check_size(self, known: SampledBatch, batch_size: int) -> None:
        if len(known.uids) != batch_size:
            raise DataError(
                f"{known.lease_id} was sampled with {len(known.uids)} prompts, now asked for "
                f"{batch_size}"
            )


def _lease_id(key: CallKey, partition_id: str) -> str:
    return f"{partition_id}@{key.global_step}.{key.inner_step}"
