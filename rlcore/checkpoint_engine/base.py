"""Who takes part in a weight update, and the registries of what carries the bytes.

A transport has two halves of one name: a `CheckpointEngine`, used by the manager, tells every
replica where its bytes come from and collects what they acknowledge; a `WeightReceiver`, used
inside a replica, fills a `WeightBuffer` bucket by bucket. Between them travels `WeightMeta`, whose
`transport` names the backend.
"""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlcore.checkpoint_engine.buffer import Bucket, WeightBuffer
from rlcore.config import RunConfig
from rlcore.errors import ActorUnavailableError, DeadlineExceededError, RLCoreError
from rlcore.registry import Registry
from rlcore.types import CallKey, WeightMeta

LOST = (ActorUnavailableError, DeadlineExceededError)
"""A replica that ends with one of these is dead or hung, whatever it was asked."""


class WeightSource(Protocol):
    """The training side: publishes the present weights."""

    def publish_weights(self, key: CallKey) -> WeightMeta:
        """Write the weights where replicas can read them; the same state keeps its version."""
        ...

    def published_weights(self) -> WeightMeta | None:
        """Return what was written last, also while it trains; None: nothing yet."""
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

    def committed_weights(self) -> WeightMeta | None:
        """Return what was committed last; None: still the weights of the model folder."""
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

    def kill(self) -> None:
        """End it, also when it does not answer; it serves nothing any more."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Acknowledgement:
    """What a replica says it has loaded."""

    replica: str
    version: int
    num_bytes: int
    checksum: str


Outcome = Acknowledgement | RLCoreError
"""Of one replica: what it has loaded, or why it has not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferSettings:
    """How bytes travel, whatever the backend."""

    bucket_bytes: int = 64 << 20
    """Size of a piece."""
    bucket_deadline_s: float = 60.0
    """How long a piece may take until the transfer counts as stalled."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Of the backend alone."""

    @classmethod
    def from_config(cls, config: RunConfig) -> "TransferSettings":
        """Read `actor_rollout_ref.rollout.checkpoint_engine` and `deadlines.control`."""
        engine = config.actor_rollout_ref.rollout.checkpoint_engine
        return cls(
            bucket_bytes=engine.update_weights_bucket_megabytes << 20,
            bucket_deadline_s=config.deadlines.control,
            options=engine.engine_kwargs.get(engine.backend, {}),
        )

    def transport(self, backend: str, **more: Any) -> dict[str, Any]:
        """Return the `WeightMeta.transport` of a push."""
        shared = {
            "backend": backend,
            "sender_pid": os.getpid(),
            "bucket_bytes": self.bucket_bytes,
            "bucket_deadline_s": self.bucket_deadline_s,
        }
        return shared | more


class CheckpointEngine(Protocol):
    """Carries published weights to replicas that are gated. One object per push."""

    def __init__(self, settings: TransferSettings) -> None: ...

    def push(
        self, key: CallKey, meta: WeightMeta, replicas: Mapping[str, Replica]
    ) -> dict[str, Outcome]:
        """Load `meta` in every replica and return by name how it went.

        Raises:
            WeightSyncError, TransientError: nothing could be sent to anybody.
        """
        ...


class WeightReceiver(Protocol):
    """Fetches published bytes inside a replica. One object per replica, kept between updates."""

    def receive(self, meta: WeightMeta, buffer: WeightBuffer) -> Iterator[Bucket]:
        """Fill `buffer`, which has begun `meta`; yield each bucket when it is there and hashed.

        Raises:
            WeightSyncError: the source does not hold what `meta` says.
            WeightTransferError: the source died or stalled.
        """
        ...


CHECKPOINT_ENGINES: Registry[type[CheckpointEngine]] = Registry("checkpoint engine")
WEIGHT_RECEIVERS: Registry[type[WeightReceiver]] = Registry("weight receiver")


def load_each(
    key: CallKey, metas: Mapping[str, WeightMeta], replicas: Mapping[str, Replica]
) -> dict[str, Outcome]:
    """Let every replica load its meta, all at once; return by name how it went."""

    def load(name: str) -> Outcome:
        try:
            answer = replicas[name].load_weights(key, metas[name])
        except RLCoreError as error:
            return error
        return Acknowledgement(
            replica=name,
            version=answer["version"],
            num_bytes=answer["num_bytes"],
            checksum=answer["checksum"],
        )

    with ThreadPoolExecutor(max_workers=max(len(replicas), 1)) as threads:
        return dict(zip(replicas, threads.map(load, replicas), strict=True))
