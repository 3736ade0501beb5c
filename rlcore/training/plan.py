"""What models in training are told: plain values, so that they can be sent to any process."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcore.algorithms.aggregate import AggMode
from rlcore.training.batches import MicroBatchLimits, mini_batches
from rlcore.training.schedule import LearningRate
from rlcore.types import CallKey

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """AdamW, clipping and the limits of a micro-batch."""

    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    limits: MicroBatchLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatePlan:
    """How a batch becomes optimizer steps."""

    learning_rate: LearningRate
    mini_batch_groups: int
    """Groups (prompts) per optimizer step."""
    epochs: int = 1
    shuffle: bool = False
    shuffle_seed: int = 42
    max_nonfinite_steps: int = 3

    def steps(self, key: CallKey, groups: Sequence[Hashable]) -> list[list[int]]:
        """Return the row numbers of every optimizer step; the same for a repeat."""
        steps: list[list[int]] = []
        for epoch in range(self.epochs):
            seed = None
            if self.shuffle:
                place = (key.global_step * 1_000 + key.inner_step) * 1_000 + epoch
                seed = self.shuffle_seed * 1_000_003 + place
            steps += mini_batches(groups, self.mini_batch_groups, shuffle_seed=seed)
        return steps


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticSpec:
    """The critic's model, optimizer, loss and limits."""

    model_path: str
    optimizer: OptimizerSpec
    plan: UpdatePlan
    trust_remote_code: bool = False
    forward_limits: MicroBatchLimits
    """Of passes without gradient."""
    loss_settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of `value_loss` besides the aggregation."""
    loss_agg_mode: AggMode = "token-mean"
    loss_scale_factor: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSpec:
    """Which adapters."""

    rank: int
    alpha: float = 16.0
    """Scale, divided by the rank."""
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    exclude_modules: tuple[str, ...] | None = None
    merge: bool = True
    """Publish the model's weights with the adapters in them; False: the adapters alone."""
