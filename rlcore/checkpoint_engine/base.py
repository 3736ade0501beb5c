"""Who takes part in a weight update, and the registry of the engines that carry the bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlcore.registry import Registry
from rlcore.types import CallKey, WeightMeta


class WeightSource(Protocol):
    """The training side: publishes the present weights."""

    def publish_weights(self, key: CallKey) -> WeightMeta:
        """Write the weights where replicas can read them; the same state keeps its version."""
        ...


class Replica(Protocol):
    """One LLM server as the transaction needs it; every call has a deadline of its own."""

    def prepare_weights(self, key: CallKey, version: int) -> None:
        """Close the gate: no request starts until commit or abandon."""
        ...

    def load_weights(self, key: CallKey, meta: WeightMeta) -> dict[str, Any]:
        """Take the weights and stay gated; return version, num_bytes and checksum."""
        ...

    def commit_weights(self, key: CallKey, version: int) -> None:
        """Open the gate on the loaded weights."""
        ...

    def abandon_weights(self, key: CallKey, version: int) -> None:
        """Open the gate on the last committed weights."""
        ...

    def abort(self, key: CallKey) -> object:
        """Stop all requests; clients keep what was generated."""
        ...

    def resume(self, key: CallKey) -> None:
        """Serve again after abort or pause."""
        ...

    def sleep(self, key: CallKey) -> None:
        """Free memory; a request wakes the replica."""
        ...

    def wake_up(self, key: CallKey) -> None:
        """Serve again with the last committed weights."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Acknowledgement:
    """What a replica says it has loaded."""

    replica: str
    version: int
    num_bytes: int
    checksum: str


class CheckpointEngine(Protocol):
    """Carries published weights to replicas that are gated."""

    def push(
        self, key: CallKey, meta: WeightMeta, replicas: Sequence[tuple[str, Replica]]
    ) -> list[Acknowledgement]:
        """Load `meta` in every replica and return what each has loaded.

        Raises:
            WeightSyncError, TransientError: a replica did not load them.
        """
        ...


CHECKPOINT_ENGINES: Registry[type[CheckpointEngine]] = Registry("checkpoint engine")
