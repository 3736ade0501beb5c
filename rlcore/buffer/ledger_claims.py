"""The workers' side of the ledger: feed, claim, renew, settle, and back to pending."""

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict

from rlcore.buffer.batches import check_session, check_spec
from rlcore.buffer.ledger_core import LedgerCore
from rlcore.buffer.ledger_state import ACTIVE, WAITING, Prompt
from rlcore.errors import DataError, FencedError
from rlcore.types import CallKey, PromptSpec, PromptStatus, SessionRecord

logger = logging.getLogger(__name__)

MAX_CLAIMS = 5
"""A prompt whose worker was lost this many times is quarantined: it may be what kills it. Not
counted are workers that ended because no replica served."""


class LedgerClaims(LedgerCore):
    """See Ledger."""

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
        self._is_restored = False
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
        queue; validation shares it. None either between a restore and the first feed (an empty one
        will do): the replicas have not got the restored weights yet.

        Raises:
            FencedError: `attempt` is lower than the one seen.
        """
        self.fence(attempt)
        self.expire()
        if self._is_restored:
            return []
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

    def release_worker(self, worker_id: str, is_blameless: bool = False) -> list[str]:
        """Return what a dead or stopped worker runs to pending; return the uids.

        Args:
            worker_id: Whose prompts.
            is_blameless: Its end had nothing to do with what it ran: these claims do not count.
        """
        owned = [p.uid for p in self._state.with_status("running") if p.owner == worker_id]
        self._take_back(owned, f"worker {worker_id} was released", is_blameless=is_blameless)
        return owned

    def expire(self) -> list[str]:
        """Return prompts of lapsed leases to pending; return the uids."""
        now = self._clock()
        if now < self._first_lapse:
            return []
        lapsed = [uid for uid, until in self._lease_until.items() if until <= now]
        self._take_back(lapsed, f"its lease of {self.claim_lease_s:g} s lapsed")
        self._first_lapse = min(self._lease_until.values(), default=math.inf)
        return lapsed

    def next_expiry_s(self) -> float | None:
        """Return in how many seconds a lease may lapse at the earliest, None without leases."""
        if not self._lease_until:
            return None
        return max(0.0, self._first_lapse - self._clock())

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

    def _is_run_by(self, uid: str, worker_id: str) -> bool:
        prompt = self._state.prompts.get(uid)
        return prompt is not None and prompt.status == "running" and prompt.owner == worker_id

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

    def _take_back(self, uids: Sequence[str], reason: str, *, is_blameless: bool = False) -> None:
        prompts = [self._state.prompts[uid] for uid in uids]
        again = [p.uid for p in prompts if is_blameless or p.claims < MAX_CLAIMS]
        if again:
            logger.warning("%d prompts go back to pending: %s", len(again), reason)
            event = {"op": "return", "uids": again, "reason": reason}
            self._record(event | {"is_blameless": True} if is_blameless else event)
        self._forget_leases(again)
        for prompt in prompts:
            if prompt.uid in again:
                continue
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

    def _check_spec(self, spec: PromptSpec) -> None:
        check_spec(spec, self.run_id)
        known = self._state.partitions.get(spec.partition_id)
        if known is not None and known.validate != spec.validate:
            raise DataError(f"partition {spec.partition_id} mixes training and validation prompts")
