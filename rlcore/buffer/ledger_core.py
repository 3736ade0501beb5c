"""What every part of the ledger stands on: state, journal, fence, saving and loading."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from rlcore.buffer.batches import build_batch, window_metrics
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
from rlcore.errors import FencedError, TooManyFailuresError
from rlcore.fencing import Fence
from rlcore.types import CallKey, PromptStatus, SampledBatch

logger = logging.getLogger(__name__)


class LedgerCore:
    """See Ledger."""

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
        self._is_restored = False
        """Claims wait for the first feed after a restore: the replicas have their weights then."""
        self._first_lapse = math.inf
        """No lease ends before; a bound, so that a claim need not look at every lease."""
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
        event = trained_event(copy, released_step)
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
        self._is_restored = True

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

    def _extend(self, uids: Sequence[str]) -> None:
        until = self._clock() + self.claim_lease_s
        self._first_lapse = min(self._first_lapse, until)
        self._lease_until.update(dict.fromkeys(uids, until))

    def _forget_leases(self, uids: Sequence[str]) -> None:
        for uid in uids:
            self._lease_until.pop(uid, None)

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


def trained_event(state: LedgerState, global_step: int) -> Event:
    """Return the event that marks the training batches up to a step as trained."""
    lease_ids = [
        lease.lease_id
        for lease in state.leases.values()
        if lease.global_step <= global_step and not state.partition(lease.partition_id).validate
    ]
    return {"op": "trained", "global_step": global_step, "lease_ids": lease_ids}
