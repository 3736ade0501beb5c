"""CheckpointEngineManager: a weight update is a transaction over all replicas (verl's names).

    publish    the trainer writes its segment            -> version, bytes, checksum
    prepare    every replica closes its gate
    push       every replica loads, acknowledges, stays gated
    commit     only if every acknowledgement equals what was published; gates open

A failure before the commit opens the gates on the weights committed before; the update can then be
tried again, under the same version as long as the trainer's state is the same. Once the commit has
begun nobody may serve the old weights: a replica that fails to commit stays gated, the error names
it, and the retry commits it.

A replica that dies or hangs on the way is lost: it is killed before the commit, so that it can
serve nothing when it comes to itself, and the others go on if `min_replicas` are left. One that is
alive and refuses ends the update for all. Who joins is brought to the committed version first, and
to rest as the members do.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlcore.checkpoint_engine.backends import BUILT_IN
from rlcore.checkpoint_engine.base import (
    CHECKPOINT_ENGINES,
    LOST,
    Acknowledgement,
    Replica,
    TransferSettings,
    WeightSource,
)
from rlcore.errors import RLCoreError, TransientError, WeightSyncError
from rlcore.types import CallKey, WeightMeta

logger = logging.getLogger(__name__)

# Imported for their registration.
_BUILT_IN = BUILT_IN

RESTS = ("abort", "sleep")
"""Control calls whose effect lasts; a replica that joins meanwhile gets them, in this order."""
ENDS = {"resume": "abort", "wake_up": "sleep"}
"""Control calls that end the effect of one of RESTS."""


class CheckpointEngineManager:
    """Publishes the trainer's weights to the replicas and controls these.

    Picklable: goes to executors with the trainer. `with_key` names the caller; without it calls
    are refused. Calls that change weights or members run one at a time; of copies in several
    processes, whoever holds the original sees to that with `exclusive`.

    Attributes:
        replicas: The members, by name.
        resting: Those of RESTS that are in effect. An update ends none of them, and a request that
            wakes a sleeping replica is not heard of here: who joins then sleeps until a request.

    Example:
        >>> manager = CheckpointEngineManager(training, {"replica-0": client}, backend="shm")
        >>> manager.with_key(key).update_weights(global_steps=12)["version"]
        12
    """

    def __init__(
        self,
        training: WeightSource,
        replicas: Mapping[str, Replica],
        *,
        backend: str = "naive",
        settings: TransferSettings | None = None,
        min_replicas: int = 1,
        key: CallKey | None = None,
    ) -> None:
        """Make a manager.

        Args:
            training: Who publishes.
            replicas: Members, by name.
            backend: Entry of CHECKPOINT_ENGINES.
            settings: Bucket size, deadlines and the backend's own options.
            min_replicas: A commit needs as many replicas that have loaded.
            key: Of the caller.

        Raises:
            ConfigError: there is no such backend, or it cannot run here.
        """
        self.training = training
        self.replicas = dict(replicas)
        self.resting: set[str] = set()
        self.backend = backend
        self.settings = settings or TransferSettings()
        self.min_replicas = min_replicas
        self.key = key
        self._lock = threading.RLock()
        CHECKPOINT_ENGINES.get(backend)(self.settings)

    def with_key(self, key: CallKey) -> "CheckpointEngineManager":
        """Return a manager of the same members whose calls carry `key`."""
        other = CheckpointEngineManager.__new__(CheckpointEngineManager)
        other.__dict__ = {**self.__dict__, "key": key}
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = {**state, "_lock": threading.RLock()}

    def exclusive(self) -> threading.RLock:
        """Return the lock that updates and changes of the members hold (`with` it)."""
        return self._lock

    def update_weights(self, global_steps: int) -> dict[str, Any]:
        """Publish the trainer's weights to every replica.

        Args:
            global_steps: The step whose weights these are, for the log.

        Returns:
            version, bytes, seconds, gb_per_s, replicas (how many serve it), lost (names of those
            that died or hung and were killed; they are no members any more).

        Raises:
            WeightSyncError: a replica refused or acknowledged something else, or there is none.
            TransientError: trainer or replicas did not answer; the update may be tried again.
        """
        key = self._key()
        with self._lock:
            if not self.replicas:
                raise WeightSyncError("there is no replica to send weights to")
            started = time.perf_counter()
            meta = self.training.publish_weights(key)
            members = dict(self.replicas)
            served = self._transact(key, meta, members, self.min_replicas)
            lost = sorted(set(members) - set(served))
            self.drop_lost(members, lost)
        seconds = time.perf_counter() - started
        result = {
            "version": meta.version,
            "bytes": meta.num_bytes,
            "seconds": seconds,
            "gb_per_s": meta.num_bytes / 1e9 / seconds,
            "replicas": len(served),
            "lost": lost,
        }
        logger.info(
            "step %d: weight version %d on %d replicas by %s: %.1f MB in %.2f s, %.2f GB/s%s",
            global_steps, meta.version, len(served), self.backend, meta.num_bytes / 1e6, seconds,
            result["gb_per_s"], f"; lost {', '.join(lost)}" if lost else "",
        )  # fmt: skip
        return result

    def add_replicas(self, replicas: Mapping[str, Replica]) -> int | None:
        """Bring replicas to the committed version and make them members; waits for an update.

        A member of the same name is replaced. They rest as the members do: asleep or aborted. The
        router may see them when this has returned.

        Returns:
            The version that they serve.

        Raises:
            WeightSyncError, TransientError: one could not be brought up; none became a member.
        """
        key = self._key()
        with self._lock:
            meta = self._committed(set(replicas)) or self.training.published_weights()
            # Only before the first update: what the trainer has now may be between two steps.
            meta = meta or self.training.publish_weights(key)
            joining = dict(replicas)
            self._transact(key, meta, joining, len(joining))
            # After the commit, which opens the gate; nobody sends them requests yet.
            for method in RESTS:
                if method in self.resting:
                    failures = _call_each(joining, lambda r, m=method: getattr(r, m)(key))
                    _drop_lost(joining, failures, method, len(joining))
            self.replicas.update(replicas)
        logger.info("%s joined with weight version %d", ", ".join(sorted(replicas)), meta.version)
        return meta.version

    def remove_replicas(self, names: Iterable[str]) -> None:
        """Leave replicas out of later updates; waits for one that runs. Unknown names are fine.

        They are left as they are: take them out of the router first, since they age from now on.
        """
        with self._lock:
            for name in names:
                self.replicas.pop(name, None)

    def drop_lost(self, members: Mapping[str, Replica], lost: Iterable[str]) -> None:
        """Let replicas that were killed in an update be members no more.

        Args:
            members: Who took part in the update.
            lost: Names of those that were killed.
        """
        with self._lock:
            for name in lost:
                # Whoever watches over the replicas may have put a new one in its place.
                if self.replicas.get(name) is members[name]:
                    del self.replicas[name]

    def was_called(self, method: str) -> None:
        """Remember what a control call leaves behind, for replicas that join later."""
        with self._lock:
            if method in RESTS:
                self.resting.add(method)
            self.resting.discard(ENDS.get(method, ""))

    def sleep_replicas(self) -> None:
        """Free the replicas' memory; a request wakes one with the last committed weights."""
        self._each("sleep")

    def wake_up_replicas(self) -> None:
        """Serve again with the last committed weights."""
        self._each("wake_up")

    def abort_replicas(self) -> None:
        """Stop all running requests; clients keep what was generated."""
        self._each("abort")

    def resume_generation_replicas(self) -> None:
        """Let replicas that were aborted or paused serve again."""
        self._each("resume")

    def _key(self) -> CallKey:
        if self.key is None:
            raise WeightSyncError("the manager has no key: use with_key(...), it names the caller")
        return self.key

    def _each(self, method: str) -> None:
        """Call every replica at once, wait for all, raise the first failure.

        One that is dead or hangs is killed: it serves nothing, whatever it was asked for. It stays
        a member, for the next update to count as lost, unless another takes its place before.
        """
        key = self._key()
        with self._lock:
            left = dict(self.replicas)
            failures = _call_each(left, lambda r: getattr(r, method)(key))
            _drop_lost(left, failures, method, 0)
            self.was_called(method)

    def _transact(
        self, key: CallKey, meta: WeightMeta, members: dict[str, Replica], min_replicas: int
    ) -> list[str]:
        """Bring `meta` to the members; return who serves it. Those left out are killed."""
        left = dict(members)
        what = f"weight version {meta.version}"
        is_loaded = False
        try:
            failures = _call_each(left, lambda r: r.prepare_weights(key, meta.version))
            _drop_lost(left, failures, what, min_replicas)
            engine = CHECKPOINT_ENGINES.get(self.backend)(self.settings)
            outcomes = engine.push(key, meta, left)
            silent = set(left) - set(outcomes)
            if silent:
                raise WeightSyncError(f"{what}: no acknowledgement of {', '.join(sorted(silent))}")
            failures = {n: o for n, o in outcomes.items() if not isinstance(o, Acknowledgement)}
            _drop_lost(left, failures, what, min_replicas)
            for outcome in outcomes.values():
                if isinstance(outcome, Acknowledgement):
                    _check(meta, outcome)
            is_loaded = True
        finally:
            if not is_loaded:
                _abandon(key, meta.version, left)
        failures = _call_each(left, lambda r: r.commit_weights(key, meta.version))
        _drop_lost(left, failures, what, min_replicas)
        return list(left)

    def _committed(self, joining: set[str]) -> WeightMeta | None:
        """Ask a member what it serves; None if none knows, i.e. nothing was committed."""
        for name, replica in self.replicas.items():
            if name in joining:
                continue
            try:
                meta = replica.committed_weights()
            except TransientError as error:
                logger.warning("replica %s does not say what it serves: %s", name, error)
                continue
            if meta is not None:
                return meta
        return None


def _call_each(
    replicas: Mapping[str, Replica], call: Callable[[Replica], object]
) -> dict[str, RLCoreError]:
    """Call all at once and wait for all; return the errors by name."""

    def one(replica: Replica) -> RLCoreError | None:
        try:
            call(replica)
        except RLCoreError as error:
            return error
        return None

    with ThreadPoolExecutor(max_workers=max(len(replicas), 1)) as threads:
        errors = threads.map(one, replicas.values())
        return {n: e for n, e in zip(replicas, errors, strict=True) if e is not None}


def _drop_lost(
    left: dict[str, Replica],
    failures: Mapping[str, RLCoreError],
    what: str,
    min_replicas: int,
) -> None:
    """Take the replicas that died or hung out of `left`, and kill them.

    Raises:
        RLCoreError: a replica that is alive refused; its own error.
        TransientError: fewer than `min_replicas` are left.
    """
    for name, error in failures.items():
        if isinstance(error, LOST):
            logger.warning("%s goes on without %s: %s", what, name, error)
            left.pop(name).kill()
    for name, error in failures.items():
        if name in left:
            logger.warning("%s is refused by %s: %s", what, name, error)
            raise error
    if len(left) < min_replicas:
        reasons = "; ".join(f"{name}: {error}" for name, error in failures.items())
        raise TransientError(
            f"{what}: {len(left)} replicas are left, {min_replicas} are needed ({reasons})"
        )


def _abandon(key: CallKey, version: int, replicas: Mapping[str, Replica]) -> None:
    """Open every gate again; a replica that cannot is logged, the update's error is raised."""
    failures = _call_each(replicas, lambda r: r.abandon_weights(key, version))
    for name, error in failures.items():
        logger.warning("replica %s did not abandon version %d: %s", name, version, error)


def _check(meta: WeightMeta, ack: Acknowledgement) -> None:
    """Hold a replica's acknowledgement against what was published.

    Raises:
        WeightSyncError: it differs; names the replica and both values.
    """
    published = (meta.version, meta.num_bytes, meta.checksum)
    loaded = (ack.version, ack.num_bytes, ack.checksum)
    if loaded != published:
        raise WeightSyncError(
            f"replica {ack.replica} loaded (version, bytes, checksum) {loaded}, published "
            f"were {published}"
        )
