"""The ledger's actor as its callers see it: every call with a deadline."""

from collections.abc import Sequence
from typing import Any

from ray.actor import ActorHandle

from rlcore.buffer.policy import SamplePolicy
from rlcore.cluster.calls import wait_for_reply
from rlcore.types import CallKey, PromptSpec, PromptStatus, SampledBatch, SessionRecord


class LedgerClient:
    """The ledger for synchronous code in another process; every call has a deadline.

    Raises in every method besides the ledger's own errors:
        DeadlineExceededError: no answer within the deadline.
        ActorUnavailableError: the ledger's process died.
    """

    def __init__(self, handle: ActorHandle, deadline_s: float = 60.0) -> None:
        self.handle = handle
        self.deadline_s = deadline_s

    def ping(self) -> dict[str, Any]:
        """See LedgerActor.ping."""
        return self._call("ping")

    def feed(self, key: CallKey, specs: Sequence[PromptSpec]) -> int:
        """See Ledger.feed."""
        return self._call("feed", key, list(specs))

    def claim(self, attempt: int, worker_id: str, limit: int) -> list[PromptSpec]:
        """See Ledger.claim."""
        return self._call("claim", attempt, worker_id, limit)

    def renew(self, worker_id: str, uids: Sequence[str]) -> list[str]:
        """See Ledger.renew."""
        return self._call("renew", worker_id, list(uids))

    def release_worker(self, worker_id: str, is_blameless: bool = False) -> list[str]:
        """See Ledger.release_worker."""
        return self._call("release_worker", worker_id, is_blameless)

    def settle(self, worker_id: str, uid: str, sessions: Sequence[SessionRecord]) -> PromptStatus:
        """See Ledger.settle."""
        return self._call("settle", worker_id, uid, list(sessions))

    def sample(self, key: CallKey, partition_id: str, batch_size: int) -> SampledBatch | None:
        """See Ledger.sample."""
        return self._call("sample", key, partition_id, batch_size)

    def wait_sample(
        self,
        key: CallKey,
        partition_id: str,
        batch_size: int,
        deadline_s: float,
        policy: SamplePolicy = SamplePolicy(),  # noqa: B008  frozen
        *,
        lease: bool = True,
    ) -> SampledBatch | None:
        """See LedgerActor.wait_sample; the reply has this client's deadline on top."""
        arguments = (key, partition_id, batch_size, deadline_s, policy, lease)
        return self._call("wait_sample", *arguments, extra=deadline_s)

    def lease(
        self, key: CallKey, partition_id: str, uids: Sequence[str], policy: SamplePolicy
    ) -> SampledBatch:
        """See Ledger.lease."""
        return self._call("lease", key, partition_id, list(uids), policy)

    def lease_of(self, key: CallKey, partition_id: str) -> SampledBatch | None:
        """See Ledger.lease_of."""
        return self._call("lease_of", key, partition_id)

    def view(self, partition_id: str) -> dict[str, Any]:
        """See Ledger.view."""
        return self._call("view", partition_id)

    def wait_settled(
        self, key: CallKey, partition_id: str, deadline_s: float
    ) -> dict[str, list[SessionRecord]]:
        """See LedgerActor.wait_settled; the reply has this client's deadline on top."""
        return self._call("wait_settled", key, partition_id, deadline_s, extra=deadline_s)

    def leased(self, lease_id: str) -> SampledBatch:
        """See Ledger.leased."""
        return self._call("leased", lease_id)

    def needs_refill(
        self,
        partition_id: str,
        policy: SamplePolicy = SamplePolicy(),  # noqa: B008  frozen
    ) -> int:
        """See Ledger.needs_refill."""
        return self._call("needs_refill", partition_id, policy)

    def mark_trained(self, key: CallKey, global_step: int) -> list[str]:
        """See Ledger.mark_trained."""
        return self._call("mark_trained", key, global_step)

    def discard(self, key: CallKey, partition_id: str) -> list[str]:
        """See Ledger.discard."""
        return self._call("discard", key, partition_id)

    def return_to_pending(self, key: CallKey, uids: Sequence[str]) -> None:
        """See Ledger.return_to_pending."""
        self._call("return_to_pending", key, list(uids))

    def waiting_rows(self, partition_id: str) -> dict[str, list[str]]:
        """See Ledger.waiting_rows."""
        return self._call("waiting_rows", partition_id)

    def counts(self, partition_id: str) -> dict[str, int]:
        """See Ledger.counts."""
        return self._call("counts", partition_id)

    def overdue(self, partition_id: str) -> list[str]:
        """See Ledger.overdue."""
        return self._call("overdue", partition_id)

    def check_conservation(self) -> None:
        """See Ledger.check_conservation."""
        self._call("check_conservation")

    def fence(self, attempt: int) -> None:
        """See Ledger.fence."""
        self._call("fence", attempt)

    def state_dict(self, released_step: int | None = None) -> dict[str, Any]:
        """See Ledger.state_dict."""
        return self._call("state_dict", released_step)

    def load_state_dict(self, key: CallKey, saved: dict[str, Any]) -> None:
        """See Ledger.load_state_dict."""
        self._call("load_state_dict", key, saved)

    def _call(self, method: str, *args: Any, extra: float = 0.0) -> Any:
        reply = getattr(self.handle, method).remote(*args)
        return wait_for_reply(reply, what=f"ledger.{method}", deadline_s=self.deadline_s + extra)
