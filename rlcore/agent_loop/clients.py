"""What an AgentLoopWorker needs of ledger and queue host; rlcore/cluster wraps Ray handles."""

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from rlcore.agent_loop.rows import Row
from rlcore.types import PromptSpec, SessionRecord


class WorkerLedger(Protocol):
    """The ledger's methods for workers. Each raises ActorUnavailableError when it is not there."""

    async def claim(self, worker_id: str, limit: int, wait_s: float) -> list[PromptSpec]:
        """Lease up to `limit` pending prompts; wait up to `wait_s` while there is none."""
        ...

    def renew(self, worker_id: str, uids: Sequence[str]) -> list[str]:
        """Renew leases, return the uids that this worker no longer owns; called from a thread."""
        ...

    async def settle(self, worker_id: str, uid: str, sessions: Sequence[SessionRecord]) -> None:
        """Record how all sessions of a prompt ended.

        Raises:
            FencedError: the lease is no longer this worker's.
        """
        ...

    async def release_worker(self, worker_id: str) -> None:
        """Return what the worker still holds to pending."""
        ...


class WorkerQueue(Protocol):
    """The queue host's method for workers."""

    async def put_rows(
        self,
        partition_id: str,
        keys: Sequence[str],
        rows: Sequence[Row],
        tags: Sequence[dict[str, Any]],
    ) -> None:
        """Store rows; writing the same key again overwrites.

        Raises:
            ActorUnavailableError: the host is not there.
            DeadlineExceededError: it did not answer in time.
        """
        ...


class LeaseRenewer:
    """Renews a worker's leases from a thread of its own: user code may block the event loop."""

    def __init__(self, ledger: WorkerLedger, worker_id: str, interval_s: float) -> None:
        self._ledger = ledger
        self._worker_id = worker_id
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._held: set[str] = set()
        self._lost: set[str] = set()
        self._error: Exception | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._renew_forever, name=f"leases-{worker_id}", daemon=True
        )

    def start(self) -> None:
        """Begin renewing."""
        self._thread.start()

    def stop(self) -> None:
        """Stop renewing; returns at once, the thread ends by itself."""
        self._stopped.set()

    def hold(self, uid: str) -> None:
        """Renew the lease of a prompt from now on."""
        with self._lock:
            self._held.add(uid)

    def drop(self, uid: str) -> None:
        """No longer renew it."""
        with self._lock:
            self._held.discard(uid)
            self._lost.discard(uid)

    def take_lost(self) -> set[str]:
        """Return the prompts whose lease was lost since the last call.

        Raises:
            RLCoreError: renewing failed; the worker's leases will lapse.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            lost, self._lost = self._lost, set()
            return lost

    def _renew_forever(self) -> None:
        while not self._stopped.wait(self._interval_s):
            with self._lock:
                held = sorted(self._held)
            if not held:
                continue
            try:
                lost = self._ledger.renew(self._worker_id, held)
            except Exception as error:  # noqa: BLE001  raised in the worker's loop by take_lost
                with self._lock:
                    self._error = error
                return
            with self._lock:
                self._lost.update(set(lost) & self._held)
