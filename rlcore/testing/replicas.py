"""An LLM server's control lane in memory: for tests of weight updates without an engine."""

from typing import Any

import torch

from rlcore.checkpoint_engine.segment import read_tensors
from rlcore.errors import ActorUnavailableError, TransientError
from rlcore.types import CallKey, WeightMeta


class FakeReplica:
    """Keeps the weights it loads, a gate, and the order of the calls.

    Attributes:
        calls: Names of the calls received, in order.
        is_gated: No request would start now.
        version: Committed version, None before the first.
        weights: Committed tensors by name.
        fail_on: Name of a call that raises TransientError once.
        lie: Fields of the acknowledgement that are given wrongly.
        is_dead: Every call raises ActorUnavailableError.
        committed: What was committed last.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.is_gated = False
        self.version: int | None = None
        self.weights: dict[str, torch.Tensor] = {}
        self.fail_on = ""
        self.lie: dict[str, Any] = {}
        self.is_dead = False
        self.committed: WeightMeta | None = None
        self._staged: dict[str, torch.Tensor] = {}
        self._meta: WeightMeta | None = None

    def prepare_weights(self, key: CallKey, version: int) -> None:
        """Close the gate."""
        self._called("prepare_weights")
        self.is_gated = True

    def load_weights(self, key: CallKey, meta: WeightMeta) -> dict[str, Any]:
        """Read the segment and acknowledge it."""
        self._called("load_weights")
        self._staged = {name: tensor.clone() for name, tensor in read_tensors(meta)}
        self._meta = meta
        answer = {
            "version": meta.version,
            "num_bytes": meta.num_bytes,
            "checksum": meta.checksum,
        }
        return answer | self.lie

    def commit_weights(self, key: CallKey, version: int) -> None:
        """Use the loaded weights and open the gate."""
        self._called("commit_weights")
        self.version, self.weights, self.is_gated = version, self._staged, False
        self.committed = self._meta

    def abandon_weights(self, key: CallKey, version: int) -> None:
        """Open the gate on the old weights."""
        self._called("abandon_weights")
        self.is_gated = False

    def committed_weights(self) -> WeightMeta | None:
        """Return what was committed last."""
        return self.committed

    def kill(self) -> None:
        """Answer nothing any more."""
        self.is_dead = True

    def abort(self, key: CallKey) -> None:
        """Record the call."""
        self._called("abort")

    def resume(self, key: CallKey) -> None:
        """Record the call."""
        self._called("resume")

    def sleep(self, key: CallKey) -> None:
        """Record the call."""
        self._called("sleep")

    def wake_up(self, key: CallKey) -> None:
        """Record the call."""
        self._called("wake_up")

    def _called(self, method: str) -> None:
        if self.is_dead:
            raise ActorUnavailableError(f"{method}: it is dead")
        self.calls.append(method)
        if method == self.fail_on:
            self.fail_on = ""
            raise TransientError(f"{method} failed, as asked")
