"""The ledger: the one truth about what became of every prompt that was ever fed.

Each method decides, writes one event to the journal, applies it, and answers. The conservation rule
holds at all times and across restarts:

    fed = pending + running + waiting + sampled + trained + stale + filtered + failed + discarded

where waiting = finished + failure not yet sampled. Plain, synchronous and not thread-safe: the Ray
actor round it (rlcore/cluster/ledger.py) calls it from one event loop and adds the waiting.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from rlcore.buffer.batches import (
    build_batch,
    check_session,
    check_spec,
    row_tags,
    window_metrics,
)
from rlcore.buffer.journal import Event, Journal, read_journal
from rlcore.buffer.ledger_state import (
    ACTIVE,
    FORMAT,
    STATUSES,
    WAITING,
    Lease,
    LedgerState,
    Prompt,
)
from rlcore.buffer.policy import SamplePolicy, is_held_back, judge
from rlcore.errors import DataError, FencedError, RolloutError, TooManyFailuresError
from rlcore.fencing import Fence
from rlcore.types import CallKey, PromptSpec, PromptStatus, SampledBatch, SessionRecord

logger = logging.getLogger(__name__)

MAX_CLAIMS = 5
"""A prompt whose worker was lost this many times is quarantined: it may be what kills it."""


class Ledger:
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

    def __init__(
        self,
        run_id: str,
        journal_path: str | Path,
        attempt: int,
        clock: Callable[[], float] = time.monotonic,
        claim_lease_s: float = 60.0,
        min_sessions: int | None = None,
        max_failure_ratio: float = 0.5,
        capacity: int | None = None,
    ) -> None:
        """Start empty; a journal that is there is continued and holds earlier attempts too.

        Args:
            run_id: The run; calls for another are refused.
            journal_path: JSON lines; one living ledger writes it.
            attempt: The fencing token.
            clock: Seconds, monotonic.
            claim_lease_s: A claim that is not renewed for so long lapses.
            min_sessions: Good sessions that a group needs; None asks for all of them.
            max_failure_ratio: A larger share of failed sessions among a batch's fails the run.
            capacity: Rows that the queue holds; claims wait while it might be exceeded. None: no
                limit.

        Raises:
            CheckpointError: a living ledger writes this journal.
        """
        self.claim_lease_s = claim_lease_s
        self.min_sessions = min_sessions
        self.max_failure_ratio = max_failure_ratio
        self.capacity = capacity
        self._clock = clock
        self._state = LedgerState(clock)
        self._fence = Fence(run_id, attempt)
        self._lease_until: dict[str, float] = {}
        self._journal = Journal(journal_path)
        self._record({"op": "open", "format": FORMAT, "run_id": run_id, "attempt": attempt})

    @classmethod
    def recover(cls, journal_path: str | Path, **options: Any) -> Self:
        """Return the ledger that a journal describes, with fresh leases for what is running.

        Args:
            journal_path: Written by an earlier ledger that is gone.
            options: clock, claim_lease_s, min_sessions, max_failure_ratio, capacity as for the
                constructor.

        Raises:
            CheckpointError: the journal is missing, damaged, or has a living owner.
        """
        state = LedgerState(options.get("clock", time.monotonic))
        for event in read_journal(journal_path):
            state.apply(event)
        ledger = cls(state.run_id, journal_path, state.attempt, **options)
        ledger._load(state.to_dict(), keep_running=True)
        return ledger

    @property
    def run_id(self) -> str:
        """The run whose prompts these are."""
        return self._fence.run_id

    @property
    def attempt(self) -> int:
        """The attempt that owns the ledger; lower ones are refused."""
        return self._fence.attempt

    def fence(self, attempt: int) -> None:
        """Move to `attempt`: what workers of an older one run goes back to pending.

        Raises:
            FencedError: `attempt` is lower than the one seen.
        """
        if self._fence.advance(attempt):
            self._record({"op": "fence", "attempt": attempt})
            self._lease_until.clear()

    def give_up(self, key: CallKey) -> None:
        """Refuse a try of a phase from now on; its process is about to be killed."""
        self._fence.give_up(key)

    def feed(self, key: CallKey, specs: Sequence[PromptSpec]) -> int:
        """Add prompts that are not there yet (by uid), in this order; return how many were new.

        New prompts first replace groups that were evicted (see `needs_refill`). A validation prompt
        that was discarded may be fed again. A training prompt of a step before the last trained one
        was fed in its time and is not new. A row of the data whose groups failed again and again is
        quarantined: its prompt counts as fed and failed, and another replaces it.

        Raises:
            DataError: a uid with an underscore, or a partition of another run.
            FencedError: an older caller.
        """
        self._admit(key)
        fresh: dict[str, PromptSpec] = {}
        for spec in specs:
            self._check_spec(spec)
            known = self._state.prompts.get(spec.uid)
            if known is None and not spec.validate and spec.global_step < self._state.trained_step:
                continue
            if known is None or (known.status == "discarded" and spec.validate):
                fresh.setdefault(spec.uid, spec)
        if fresh:
            values = [asdict(spec) for spec in fresh.values()]
            self._record({"op": "feed", "specs": values})
        return len(fresh)

    def claim(self, attempt: int, worker_id: str, limit: int) -> list[PromptSpec]:
        """Lease up to `limit` pending prompts to a worker, oldest first.

        None while the rows of what runs and waits might exceed `capacity`: the back-pressure of the
        queue. Validation shares the capacity.

        Raises:
            FencedError: `attempt` is lower than the one seen.
        """
        self.fence(attempt)
        self.expire()
        prompts = self._fitting(self._state.oldest("pending", max(0, limit)))
        if not prompts:
            return []
        uids = [prompt.uid for prompt in prompts]
        self._record({"op": "claim", "worker": worker_id, "uids": uids})
        self._extend(uids)
        return [prompt.spec for prompt in prompts if prompt.spec is not None]

    def renew(self, worker_id: str, uids: Sequence[str]) -> list[str]:
        """Extend leases; return those of `uids` that are no longer this worker's."""
        lost = [uid for uid in uids if not self._is_run_by(uid, worker_id)]
        self._extend([uid for uid in uids if uid not in lost])
        return lost

    def release_worker(self, worker_id: str) -> list[str]:
        """Return what a dead or stopped worker runs to pending; return the uids."""
        owned = [p.uid for p in self._state.with_status("running") if p.owner == worker_id]
        self._take_back(owned, f"worker {worker_id} was released")
        return owned

    def expire(self) -> list[str]:
        """Return prompts of lapsed leases to pending; return the uids."""
        now = self._clock()
        lapsed = [uid for uid, until in self._lease_until.items() if until <= now]
        self._take_back(lapsed, f"its lease of {self.claim_lease_s:g} s lapsed")
        return lapsed

    def next_expiry_s(self) -> float | None:
        """Return in how many seconds the next lease lapses, None without leases."""
        if not self._lease_until:
            return None
        return max(0.0, min(self._lease_until.values()) - self._clock())

    def settle(self, worker_id: str, uid: str, sessions: Sequence[SessionRecord]) -> PromptStatus:
        """Record how all sessions of a prompt ended; a repeat returns what was recorded.

        Returns:
            `finished`, or `failure` when fewer than `min_sessions` are good.

        Raises:
            DataError: the sessions are not those of the prompt, or a good one lacks its rows or a
                finite reward.
            FencedError: the prompt is not leased to this worker (any more).
        """
        prompt = self._state.prompts.get(uid)
        if prompt is None:
            raise DataError(f"prompt {uid} was never fed")
        if prompt.status in WAITING | {"sampled"} and prompt.owner == worker_id:
            return prompt.status
        if not self._is_run_by(uid, worker_id):
            raise FencedError(
                f"worker {worker_id} settles prompt {uid}, which is {prompt.status}"
                + (f" and leased to {prompt.owner}" if prompt.owner else "")
            )
        for session in sessions:
            check_session(uid, session)
        if sorted(s.session_id for s in sessions) != list(range(prompt.num_sessions)):
            raise DataError(
                f"prompt {uid} has {prompt.num_sessions} sessions, settled were "
                f"{[s.session_id for s in sessions]}"
            )
        return self._settle(prompt, sorted(sessions, key=lambda s: s.session_id))

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

        With `policy.max_in_flight` not more than keep that many pending and running.
        """
        owed = self._state.partition(partition_id).num_owed
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
        event = _trained_event(self._state, global_step)
        if not event["lease_ids"]:
            raise DataError(f"no training batch is leased to step {global_step}")
        self._record(event)
        return list(self._state.trained_keys)

    def discard(self, key: CallKey, partition_id: str) -> list[str]:
        """Drop every prompt of a partition that is not final; return their row keys.

        Rows of sessions that nobody has settled are not among them: clear the partition.

        Raises:
            FencedError: an older caller.
        """
        self._admit(key)
        prompts = [p for status in sorted(ACTIVE) for p in self._held(status, partition_id)]
        keys = [row for prompt in prompts for row in prompt.keys]
        if prompts:
            uids = [prompt.uid for prompt in prompts]
            self._record({"op": "discard", "uids": uids})
            self._forget_leases(uids)
        return keys

    def return_to_pending(self, key: CallKey, uids: Sequence[str]) -> None:
        """Send groups whose rows are lost back to pending, to be run again.

        A sampled batch that loses a group is dissolved: its others wait to be sampled again.

        Raises:
            DataError: a prompt is unknown or final.
            FencedError: an older caller.
        """
        self._admit(key)
        moved: list[str] = []
        for uid in uids:
            prompt = self._state.prompts.get(uid)
            if prompt is None or prompt.status not in ACTIVE:
                found = "was never fed" if prompt is None else f"is {prompt.status}"
                raise DataError(f"prompt {uid} cannot be run again: it {found}")
            if prompt.status not in ("pending", "running"):
                moved.append(uid)
        if moved:
            self._record({"op": "return", "uids": moved, "reason": "its rows are incomplete"})

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

    def counts(self, partition_id: str) -> dict[str, int]:
        """Return how many prompts are in each state, and `fed` and `waiting`."""
        partition = self._state.partition(partition_id)
        counts = {status: partition.counts[status] for status in STATUSES}
        waiting = sum(counts[status] for status in WAITING)
        return {"fed": partition.fed, **counts, "waiting": waiting}

    def check_conservation(self) -> None:
        """Recount everything.

        Raises:
            AssertionError: a prompt was lost or counted twice.
        """
        self._state.check_conservation()

    def overdue(self, partition_id: str) -> list[str]:
        """Describe what a waiting caller waits for, oldest first: uid, state, age, owner."""
        now = self._clock()
        lines: list[str] = []
        for status in ("running", "pending", "failure", "finished"):
            for prompt in self._held(status, partition_id):
                owner = f", owner {prompt.owner}" if prompt.owner else ", no owner"
                claims = f", claimed {prompt.claims} times" if prompt.claims > 1 else ""
                lines.append(
                    f"{prompt.uid} (step {prompt.global_step}): {status} for "
                    f"{now - prompt.since:.1f} s{owner}, {prompt.num_sessions} sessions{claims}"
                )
        return lines

    def failure_metrics(self, partition_id: str) -> dict[str, float]:
        """Return counts and share of failed sessions since the last sampled batch."""
        return window_metrics(self._state.partition(partition_id))

    def state_dict(self, released_step: int | None = None) -> dict[str, Any]:
        """Return the state as plain values.

        Args:
            released_step: Write it as if this step were marked trained and validation discarded,
                so that the checkpoint of a step holds no lease of it.
        """
        values = self._state.to_dict()
        if released_step is None:
            return values
        copy = LedgerState(self._clock)
        copy.apply({"op": "load", "state": values, "attempt": self.attempt, "keep_running": True})
        event = _trained_event(copy, released_step)
        if event["lease_ids"]:
            copy.apply(event)
        validating = [p.uid for p in copy.prompts.values() if p.validate and p.status in ACTIVE]
        copy.apply({"op": "discard", "uids": validating})
        return copy.to_dict()

    def load_state_dict(self, key: CallKey, saved: dict[str, Any]) -> None:
        """Replace the state by a saved one; what ran then is pending, the attempt never gets lower.

        Raises:
            CheckpointError: written by another format.
            FencedError: the state of another run, or an older caller.
        """
        self._admit(key)
        if saved["run_id"] != self.run_id:
            raise FencedError(f"the ledger of run {saved['run_id']} was refused by {self.run_id}")
        self._load(saved, keep_running=False)

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    def _load(self, saved: dict[str, Any], *, keep_running: bool) -> None:
        self._fence.advance(max(self.attempt, saved["attempt"]))
        self._record(
            {"op": "load", "state": saved, "attempt": self.attempt, "keep_running": keep_running}
        )
        self._lease_until.clear()
        self._extend([prompt.uid for prompt in self._state.with_status("running")])

    def _record(self, event: Event) -> None:
        self._state.apply(self._journal.append(event))

    def _admit(self, key: CallKey) -> None:
        if key.run_id == self.run_id:
            self.fence(key.attempt)
        self._fence.admit(key)

    def _held(self, status: PromptStatus, partition_id: str) -> list[Prompt]:
        return self._state.with_status(status, partition_id)

    def _is_run_by(self, uid: str, worker_id: str) -> bool:
        prompt = self._state.prompts.get(uid)
        return prompt is not None and prompt.status == "running" and prompt.owner == worker_id

    def _extend(self, uids: Sequence[str]) -> None:
        until = self._clock() + self.claim_lease_s
        self._lease_until.update(dict.fromkeys(uids, until))

    def _fitting(self, prompts: list[Prompt]) -> list[Prompt]:
        """Return the first of `prompts` whose rows fit into the queue."""
        if self.capacity is None:
            return prompts
        room = self.capacity - self._num_stored()
        fitting: list[Prompt] = []
        for prompt in prompts:
            room -= prompt.num_sessions
            if room < 0:
                break
            fitting.append(prompt)
        return fitting

    def _num_stored(self) -> int:
        evicted = sum(len(keys) for keys in self._state.evicted_keys.values())
        return self._state.num_rows + evicted

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

    def _forget_leases(self, uids: Sequence[str]) -> None:
        for uid in uids:
            self._lease_until.pop(uid, None)

    def _take_back(self, uids: Sequence[str], reason: str) -> None:
        prompts = [self._state.prompts[uid] for uid in uids]
        again = [prompt.uid for prompt in prompts if prompt.claims < MAX_CLAIMS]
        if again:
            logger.warning("%d prompts go back to pending: %s", len(again), reason)
            self._record({"op": "return", "uids": again, "reason": reason})
        self._forget_leases(again)
        for prompt in prompts:
            if prompt.claims >= MAX_CLAIMS:
                message = f"claimed {prompt.claims} times and never settled; last: {reason}"
                failed = [
                    SessionRecord(
                        session_id=i,
                        keys=[],
                        tags=[],
                        error_type="Quarantined",
                        error_message=message,
                    )
                    for i in range(prompt.num_sessions)
                ]
                logger.error("prompt %s is quarantined: %s", prompt.uid, message)
                self._settle(prompt, failed)

    def _settle(self, prompt: Prompt, sessions: Sequence[SessionRecord]) -> PromptStatus:
        needed = self.min_sessions or prompt.num_sessions
        if prompt.validate:
            needed = 1
        num_good = sum(not session.is_failed for session in sessions)
        status: PromptStatus = "finished" if num_good >= needed else "failure"
        values = [asdict(session) for session in sessions]
        for session in sessions:
            if session.is_failed:
                logger.warning(
                    "session %d of prompt %s (row %s) failed: %s: %s",
                    session.session_id,
                    prompt.uid,
                    prompt.spec.index if prompt.spec else "?",
                    session.error_type,
                    session.error_message,
                )
        self._record({"op": "settle", "uid": prompt.uid, "status": status, "sessions": values})
        self._forget_leases([prompt.uid])
        return status

    def _check_failure_ratio(self, partition_id: str, batch_size: int) -> None:
        partition = self._state.partition(partition_id)
        metrics = window_metrics(partition)
        ratio = metrics["rollout/failure_ratio"]
        if partition.window_prompts >= batch_size and ratio > self.max_failure_ratio:
            raise TooManyFailuresError(
                f"{partition.window_failed_sessions} of {partition.window_sessions} sessions of "
                f"{partition_id} failed: {ratio:.2f}, over reward.max_failure_ratio "
                f"{self.max_failure_ratio:g}; the last one: {partition.last_error}"
            )

    def _batch(self, lease: Lease) -> SampledBatch:
        return build_batch(lease, [self._state.prompts[uid] for uid in lease.uids])

    def _check_spec(self, spec: PromptSpec) -> None:
        check_spec(spec, self.run_id)
        known = self._state.partitions.get(spec.partition_id)
        if known is not None and known.validate != spec.validate:
            raise DataError(f"partition {spec.partition_id} mixes training and validation prompts")


def _lease_id(key: CallKey, partition_id: str) -> str:
    return f"{partition_id}@{key.global_step}.{key.inner_step}"


def _trained_event(state: LedgerState, global_step: int) -> Event:
    lease_ids = [
        lease.lease_id
        for lease in state.leases.values()
        if lease.global_step <= global_step and not state.partition(lease.partition_id).validate
    ]
    return {"op": "trained", "global_step": global_step, "lease_ids": lease_ids}
