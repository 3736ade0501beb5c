"""A ledger in this process with the actor's wait, for tests of samplers."""

from collections.abc import Callable, Sequence
from typing import Any

from rlcore.buffer.ledger import Ledger
from rlcore.buffer.policy import SamplePolicy
from rlcore.errors import DeadlineExceededError
from rlcore.types import CallKey, SampledBatch


class InProcessLedger(Ledger):
    """Where LedgerActor waits for an event, other actors' work happens: `meanwhile(ledger)`."""

    def __init__(self, *args: Any, meanwhile: Callable[[Ledger], object], **options: Any) -> None:
        super().__init__(*args, **options)
        self.meanwhile = meanwhile

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
        """Look ten times.

        Raises:
            DeadlineExceededError: there was no batch.
        """
        assert deadline_s > 0
        for _ in range(10):
            batch = self.sample(key, partition_id, batch_size, policy, lease=lease)
            if batch is not None or self.needs_refill(partition_id, policy):
                return batch
            self.meanwhile(self)
        raise DeadlineExceededError("nobody works")


class FakeRows:
    """A queue that has lost some rows: it says so once."""

    def __init__(self, lost: Sequence[str] = ()) -> None:
        self.lost = set(lost)

    def incomplete(
        self, partition_id: str, keys: Sequence[str], columns: Sequence[str]
    ) -> list[str]:
        """Return those of `keys` that are lost."""
        assert "response_mask" in columns
        found = [key for key in keys if key in self.lost]
        self.lost.clear()
        return found
