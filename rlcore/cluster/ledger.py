"""The ledger as a Ray actor: adds waiting to rlcore/buffer/ledger.py, by event and with deadlines.

| who            | waits for                  | unblocked by                                      |
|----------------|----------------------------|---------------------------------------------------|
| claim          | a pending prompt           | feed, release, lapse, return, a new attempt       |
| wait_sample    | a full batch, or a refill  | settle (and what else changes states)             |
| wait_settled   | the last running prompt    | settle                                            |
| expiry         | the next lease's end       | its time; a claim or renewal that changes it      |

Needs no torch. Ray starts an actor whose process died anew under the same handle; it goes on from
its journal, with fresh leases. Who called meanwhile gets ActorUnavailableError and calls again: a
phase by its retry, a worker by being replaced.
"""

import asyncio
import time
from typing import Any

import ray

from rlcore.buffer.journal import has_events
from rlcore.buffer.ledger import Ledger
from rlcore.buffer.policy import SamplePolicy
from rlcore.cluster.ledger_client import LedgerClient
from rlcore.errors import DeadlineExceededError, FencedError
from rlcore.types import CallKey, PromptSpec, PromptStatus, SampledBatch, SessionRecord

MAX_NAMED_PROMPTS = 20
"""How many prompts the message of an overdue wait names."""


MAX_RESTARTS = 5
"""How often Ray starts a ledger anew that died; then the attempt ends as crashed."""


@ray.remote(num_cpus=0, max_restarts=MAX_RESTARTS, max_task_retries=0)
class LedgerActor:
    """One ledger; its methods answer in the order in which they arrive."""

    def __init__(self, run_id: str, journal_path: str, attempt: int, **options: Any) -> None:
        if has_events(journal_path):
            self._ledger = Ledger.recover(journal_path, **options)
            self._ledger.fence(attempt)
        else:
            self._ledger = Ledger(run_id, journal_path, attempt, **options)
        # Replaced at every change. A waiter takes it before it looks, so that no change is missed.
        self._changed = asyncio.Event()
        self._expiry: asyncio.Task[None] | None = None
        self._released: set[str] = set()

    async def ping(self) -> dict[str, Any]:
        """Say that the ledger lives, and whose it is."""
        return {"run_id": self._ledger.run_id, "attempt": self._ledger.attempt}

    async def fence(self, attempt: int) -> None:
        """See Ledger.fence."""
        self._ledger.fence(attempt)
        self._wake()

    async def give_up(self, key: CallKey) -> None:
        """See Ledger.give_up; a wait of that try ends."""
        self._ledger.give_up(key)
        self._wake()

    async def feed(self, key: CallKey, specs: list[PromptSpec]) -> int:
        """See Ledger.feed."""
        num_new = self._ledger.feed(key, specs)
        self._wake()
        return num_new

    async def claim(
        self, attempt: int, worker_id: str, limit: int, wait_s: float = 0.0
    ) -> list[PromptSpec]:
        """See Ledger.claim; waits up to `wait_s` for a pending prompt, else returns none.

        Raises:
            FencedError: the worker was released.
        """
        ends = time.monotonic() + wait_s
        while True:
            if worker_id in self._released:
                raise FencedError(f"worker {worker_id} was released; another id must claim")
            changed = self._changed
            specs = self._ledger.claim(attempt, worker_id, limit)
            if specs:
                self._wake()
            if specs or not await _is_set_within(changed, ends - time.monotonic()):
                return specs

    async def renew(self, worker_id: str, uids: list[str]) -> list[str]:
        """See Ledger.renew."""
        return self._ledger.renew(worker_id, uids)

    async def release_worker(self, worker_id: str, is_blameless: bool = False) -> list[str]:
        """See Ledger.release_worker; its id can claim no more."""
        # A claim of a dead worker may still wait here; it must not lease prompts to nobody.
        self._released.add(worker_id)
        uids = self._ledger.release_worker(worker_id, is_blameless)
        self._wake()
        return uids

    async def settle(self, worker_id: str, uid: str, sessions: list[SessionRecord]) -> PromptStatus:
        """See Ledger.settle."""
        status = self._ledger.settle(worker_id, uid, sessions)
        self._wake()
        return status

    async def sample(self, key: CallKey, partition_id: str, batch_size: int) -> SampledBatch | None:
        """See Ledger.sample."""
        return self._ledger.sample(key, partition_id, batch_size)

    async def wait_sample(
        self,
        key: CallKey,
        partition_id: str,
        batch_size: int,
        deadline_s: float,
        policy: SamplePolicy = SamplePolicy(),  # noqa: B008  frozen
        lease: bool = True,
    ) -> SampledBatch | None:
        """Wait for a full batch; see Ledger.sample.

        Returns:
            None when groups were evicted and prompts must be fed first (see `needs_refill`).

        Raises:
            DeadlineExceededError: overdue; names uids, states, ages and owners.
            DataError, FencedError, TooManyFailuresError: see Ledger.sample.
        """
        ends = time.monotonic() + deadline_s
        while True:
            changed = self._changed
            batch = self._ledger.sample(key, partition_id, batch_size, policy, lease=lease)
            if batch is not None or self._ledger.needs_refill(partition_id, policy):
                return batch
            if not await _is_set_within(changed, ends - time.monotonic()):
                wanted = f"{batch_size} finished prompts"
                raise DeadlineExceededError(self._overdue(key, partition_id, wanted, deadline_s))

    async def wait_settled(
        self, key: CallKey, partition_id: str, deadline_s: float
    ) -> dict[str, list[SessionRecord]]:
        """Wait until no prompt of the partition is pending or running; see Ledger.settled.

        Raises:
            DeadlineExceededError: overdue; names uids, states, ages and owners.
            TooManyFailuresError: see Ledger.settled.
        """
        ends = time.monotonic() + deadline_s
        while True:
            changed = self._changed
            sessions = self._ledger.settled(partition_id)
            if sessions is not None:
                return sessions
            if not await _is_set_within(changed, ends - time.monotonic()):
                wanted = "every prompt to settle"
                raise DeadlineExceededError(self._overdue(key, partition_id, wanted, deadline_s))

    async def leased(self, lease_id: str) -> SampledBatch:
        """See Ledger.leased."""
        return self._ledger.leased(lease_id)

    async def lease(
        self, key: CallKey, partition_id: str, uids: list[str], policy: SamplePolicy
    ) -> SampledBatch:
        """See Ledger.lease."""
        return self._ledger.lease(key, partition_id, uids, policy)

    async def lease_of(self, key: CallKey, partition_id: str) -> SampledBatch | None:
        """See Ledger.lease_of."""
        return self._ledger.lease_of(key, partition_id)

    async def view(self, partition_id: str) -> dict[str, Any]:
        """See Ledger.view."""
        return self._ledger.view(partition_id)

    async def needs_refill(
        self,
        partition_id: str,
        policy: SamplePolicy = SamplePolicy(),  # noqa: B008  frozen
    ) -> int:
        """See Ledger.needs_refill."""
        return self._ledger.needs_refill(partition_id, policy)

    async def mark_trained(self, key: CallKey, global_step: int) -> list[str]:
        """See Ledger.mark_trained."""
        return self._ledger.mark_trained(key, global_step)

    async def discard(self, key: CallKey, partition_id: str) -> list[str]:
        """See Ledger.discard."""
        keys = self._ledger.discard(key, partition_id)
        self._wake()
        return keys

    async def return_to_pending(self, key: CallKey, uids: list[str]) -> None:
        """See Ledger.return_to_pending."""
        self._ledger.return_to_pending(key, uids)
        self._wake()

    async def waiting_rows(self, partition_id: str) -> dict[str, list[str]]:
        """See Ledger.waiting_rows."""
        return self._ledger.waiting_rows(partition_id)

    async def counts(self, partition_id: str) -> dict[str, int]:
        """See Ledger.counts."""
        return self._ledger.counts(partition_id)

    async def overdue(self, partition_id: str) -> list[str]:
        """See Ledger.overdue."""
        return self._ledger.overdue(partition_id)

    async def check_conservation(self) -> None:
        """See Ledger.check_conservation."""
        self._ledger.check_conservation()

    async def state_dict(self, released_step: int | None = None) -> dict[str, Any]:
        """See Ledger.state_dict."""
        return self._ledger.state_dict(released_step)

    async def load_state_dict(self, key: CallKey, saved: dict[str, Any]) -> None:
        """See Ledger.load_state_dict."""
        self._ledger.load_state_dict(key, saved)
        self._wake()

    def _wake(self) -> None:
        """Let every waiter look again; start or restart the clock of the next lapse."""
        if self._expiry is not None and self._expiry.done():
            # It ends by an error only (a full disk, say); that must reach a caller.
            self._expiry.result()
        if self._expiry is None:
            self._expiry = asyncio.create_task(self._expire_for_ever())
        self._changed.set()
        self._changed = asyncio.Event()

    async def _expire_for_ever(self) -> None:
        while True:
            changed = self._changed
            if self._ledger.expire():
                self._changed.set()
                self._changed = changed = asyncio.Event()
            next_s = self._ledger.next_expiry_s()
            await _is_set_within(changed, next_s)

    def _overdue(self, key: CallKey, partition_id: str, wanted: str, deadline_s: float) -> str:
        counts = {name: n for name, n in self._ledger.counts(partition_id).items() if n}
        lines = self._ledger.overdue(partition_id)
        more = len(lines) - MAX_NAMED_PROMPTS
        named = lines[:MAX_NAMED_PROMPTS] + ([f"and {more} more"] if more > 0 else [])
        return (
            f"{key} waited {deadline_s:g} s for {wanted} in {partition_id}; "
            f"counts: {counts}; waiting for: " + "; ".join(named or ["nothing: no prompt was fed"])
        )


async def _is_set_within(event: asyncio.Event, seconds: float | None) -> bool:
    """Wait for `event`; return False when the time is over first."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def start_ledger(
    run_id: str, journal_path: str, attempt: int, *, deadline_s: float = 60.0, **options: Any
) -> "LedgerClient":
    """Start the ledger of a run, owned by this process, and wait until it answers.

    Args:
        run_id: The run.
        journal_path: See Ledger.
        attempt: The fencing token.
        deadline_s: For the start, and for each call of the returned client.
        options: claim_lease_s, min_sessions, max_failure_ratio of Ledger.

    Raises:
        CheckpointError: a living ledger writes this journal.
        DeadlineExceededError: no answer in time.
    """
    handle: Any = LedgerActor.remote(run_id, journal_path, attempt, **options)
    client = LedgerClient(handle, deadline_s)
    client.ping()
    return client
