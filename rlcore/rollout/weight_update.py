"""A replica's part of a weight update: prepare -> load -> commit or abandon.

While an update is open the replica samples nothing. The weights in use are not touched before the
commit, so that giving up needs no repair.
"""

import logging
from dataclasses import replace

from rlcore.errors import WeightSyncError, WeightTransferError
from rlcore.rollout.engine import Engine
from rlcore.types import CallKey, WeightMeta

logger = logging.getLogger(__name__)


class WeightUpdate:
    """The open update of one replica, and which bytes every version had."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._key: CallKey | None = None
        self._loaded: WeightMeta | None = None
        self._checksums: dict[int, str] = {}
        self.committed: WeightMeta | None = None
        """What is served; None: the weights of the model folder."""
        self.version: int | None = None
        """The version that is being brought; None: no update is open."""

    @property
    def is_open(self) -> bool:
        """Whether the gate is closed for an update."""
        return self.version is not None

    def describe(self) -> str:
        """Say who holds the gate closed, for messages; empty when nobody does."""
        return f" (gate closed by {self._key} for version {self.version})" if self.is_open else ""

    def prepare(self, key: CallKey, version: int) -> None:
        """Open an update. A newer caller's replaces one that was left open.

        Raises:
            WeightSyncError: the same caller has another version open.
        """
        if self.is_open and self.version != version:
            if key == self._key:
                raise WeightSyncError(
                    f"{self._name}: version {self.version} is being loaded; commit or abandon it "
                    f"before version {version}"
                )
            logger.warning(
                "%s: update to version %s was left open and is given up", self._name, self.version
            )
        self._key, self.version, self._loaded = key, version, None

    def load(self, engine: Engine, meta: WeightMeta) -> dict[str, int | str]:
        """Bring the bytes and return what was verified.

        Raises:
            WeightSyncError: not prepared, or of a version seen with other bytes.
            WeightTransferError: the bytes are damaged, or the sender died or stalled.
        """
        self._expect(meta.version, "load")
        known = self._checksums.get(meta.version)
        if known is not None and known != meta.checksum:
            raise WeightSyncError(
                f"{self._name}: weight version {meta.version} came with checksum {known} before "
                f"and {meta.checksum} now; a version names one set of bytes"
            )
        self._loaded = None
        try:
            found = engine.stage_weights(meta)
        except OSError as error:
            raise WeightTransferError(
                f"{self._name}: weight version {meta.version} cannot be loaded: {error}"
            ) from error
        self._checksums[meta.version] = meta.checksum
        self._loaded = meta
        return {"version": meta.version, "num_bytes": meta.num_bytes, "checksum": found}

    def commit(self, engine: Engine, version: int) -> None:
        """Put the loaded weights to use and close the update.

        Raises:
            WeightSyncError: `version` is neither loaded nor in use.
        """
        if not self.is_open and engine.weight_version == version:
            return  # a repeated call
        self._expect(version, "commit")
        if self._loaded is None:
            raise WeightSyncError(f"{self._name}: version {version} is prepared and not loaded")
        engine.commit_weights(version)
        self.committed = replace(self._loaded, transport={})
        self._close()

    def abandon(self, version: int) -> None:
        """Close the update to `version` if it is the open one."""
        if self.version == version:
            self._close()

    def _close(self) -> None:
        self._key = self.version = self._loaded = None

    def _expect(self, version: int, what: str) -> None:
        if self.version != version:
            state = f"version {self.version}" if self.is_open else "none"
            raise WeightSyncError(
                f"{self._name}: {what} of weight version {version}, prepared is {state}"
            )
