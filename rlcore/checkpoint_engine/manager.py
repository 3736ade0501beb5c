"""CheckpointEngineManager: a weight update is a transaction over all replicas (verl's names).

    publish    the trainer writes its segment            -> version, bytes, checksum
    prepare    every replica closes its gate
    push       every replica loads, acknowledges, stays gated
    commit     only if every acknowledgement equals what was published; gates open

A failure before the commit opens the gates on the weights committed before; the update can then be
tried again, under the same version as long as the trainer's state is the same. Once the commit has
begun nobody may serve the old weights: a replica that fails to commit stays gated, the error names
it, and the retry commits it.
"""

import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlcore.checkpoint_engine import naive
from rlcore.checkpoint_engine.base import (
    CHECKPOINT_ENGINES,
    Acknowledgement,
    Replica,
    WeightSource,
)
from rlcore.errors import RLCoreError, WeightSyncError
from rlcore.types import CallKey, WeightMeta

logger = logging.getLogger(__name__)

# Imported for its registration.
_BUILT_IN = (naive,)


class CheckpointEngineManager:
    """Publishes the trainer's weights to the replicas and controls these.

    Picklable: goes to executors with the trainer. `with_key` names the caller; without it calls
    are refused.

    Example:
        >>> manager = CheckpointEngineManager(training, {"replica-0": client}, backend="naive")
        >>> manager.with_key(key).update_weights(global_steps=12)["version"]
        12
    """

    def __init__(
        self,
        training: WeightSource,
        replicas: Mapping[str, Replica],
        *,
        backend: str = "naive",
        key: CallKey | None = None,
    ) -> None:
        self.training = training
        self.replicas = dict(replicas)
        self.backend = backend
        self.key = key
        CHECKPOINT_ENGINES.get(backend)

    def with_key(self, key: CallKey) -> "CheckpointEngineManager":
        """Return a manager of the same replicas whose calls carry `key`."""
        return CheckpointEngineManager(self.training, self.replicas, backend=self.backend, key=key)

    def update_weights(self, global_steps: int) -> dict[str, Any]:
        """Publish the trainer's weights to every replica.

        Args:
            global_steps: The step whose weights these are, for the log.

        Returns:
            version, bytes, seconds, gb_per_s, replicas.

        Raises:
            WeightSyncError: a replica acknowledged something else, or there is no replica.
            TransientError: trainer or replica did not answer; the update may be tried again.
        """
        key = self._key()
        if not self.replicas:
            raise WeightSyncError("there is no replica to send weights to")
        started = time.perf_counter()
        meta = self.training.publish_weights(key)
        is_loaded = False
        try:
            self._each("prepare_weights", key, meta.version)
            engine = CHECKPOINT_ENGINES.get(self.backend)()
            _check(meta, engine.push(key, meta, list(self.replicas.items())), set(self.replicas))
            is_loaded = True
        finally:
            if not is_loaded:
                self._abandon(key, meta.version)
        self._each("commit_weights", key, meta.version)
        seconds = time.perf_counter() - started
        logger.info(
            "step %d: weight version %d on %d replicas after %.2f s",
            global_steps, meta.version, len(self.replicas), seconds,
        )  # fmt: skip
        return {
            "version": meta.version,
            "bytes": meta.num_bytes,
            "seconds": seconds,
            "gb_per_s": meta.num_bytes / 1e9 / seconds,
            "replicas": len(self.replicas),
        }

    def sleep_replicas(self) -> None:
        """Free the replicas' memory; a request wakes one with the last committed weights."""
        self._each("sleep", self._key())

    def wake_up_replicas(self) -> None:
        """Serve again with the last committed weights."""
        self._each("wake_up", self._key())

    def abort_replicas(self) -> None:
        """Stop all running requests; clients keep what was generated."""
        self._each("abort", self._key())

    def resume_generation_replicas(self) -> None:
        """Let replicas that were aborted or paused serve again."""
        self._each("resume", self._key())

    def _key(self) -> CallKey:
        if self.key is None:
            raise WeightSyncError("the manager has no key: use with_key(...), it names the caller")
        return self.key

    def _each(self, method: str, key: CallKey, *args: Any) -> None:
        """Call every replica at once, wait for all, raise the first failure."""
        with ThreadPoolExecutor(max_workers=max(len(self.replicas), 1)) as threads:
            calls = [
                threads.submit(getattr(replica, method), key, *args)
                for replica in self.replicas.values()
            ]
        for call in calls:
            call.result()

    def _abandon(self, key: CallKey, version: int) -> None:
        """Open every gate again; a replica that cannot is logged, the update's error is raised."""
        for name, replica in self.replicas.items():
            try:
                replica.abandon_weights(key, version)
            except RLCoreError as error:
                logger.warning("replica %s did not abandon version %d: %s", name, version, error)


def _check(meta: WeightMeta, received: list[Acknowledgement], replicas: set[str]) -> None:
    """Hold every replica's acknowledgement against what was published.

    Raises:
        WeightSyncError: one is missing or differs; names the replica and both values.
    """
    silent = replicas - {ack.replica for ack in received}
    if silent:
        raise WeightSyncError(
            f"weight version {meta.version}: no acknowledgement of {', '.join(sorted(silent))}"
        )
    published = (meta.version, meta.num_bytes, meta.checksum)
    for ack in received:
        loaded = (ack.version, ack.num_bytes, ack.checksum)
        if loaded != published:
            raise WeightSyncError(
                f"replica {ack.replica} loaded (version, bytes, checksum) {loaded}, published "
                f"were {published}"
            )
