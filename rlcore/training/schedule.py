"""The learning rate as a function of the inner steps made: nothing to save or restore."""

import math
from dataclasses import dataclass
from typing import Literal

from rlcore.config.actor import OptimConfig
from rlcore.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """Linear warm-up from 0, then constant or a half cosine down to 0 (as transformers and verl).

    Example:
        >>> LearningRate(peak=1e-5, warmup_steps=10).at(5)
        5e-06
    """

    peak: float
    warmup_steps: int = 0
    kind: Literal["constant", "cosine"] = "constant"
    total_steps: int | None = None
    """Where cosine reaches 0."""

    def __post_init__(self) -> None:
        if self.kind == "cosine" and self.total_steps is None:
            raise ConfigError("optim.lr_scheduler_type=cosine needs the number of steps of the run")

    @classmethod
    def from_config(cls, optim: OptimConfig, total_steps: int | None) -> "LearningRate":
        """Resolve the warm-up: `lr_warmup_steps`, or its ratio of all steps where that is -1.

        Raises:
            ConfigError: a ratio or cosine without the number of steps.
        """
        warmup = optim.lr_warmup_steps
        if warmup < 0:
            if optim.lr_warmup_steps_ratio and total_steps is None:
                raise ConfigError(
                    "optim.lr_warmup_steps_ratio needs the number of steps of the run"
                )
            warmup = int(optim.lr_warmup_steps_ratio * (total_steps or 0))
        return cls(
            peak=optim.lr,
            warmup_steps=warmup,
            kind=optim.lr_scheduler_type,
            total_steps=total_steps,
        )

    def at(self, num_steps: int) -> float:
        """Return the learning rate of the inner step after `num_steps` finished ones."""
        if num_steps < self.warmup_steps:
            return self.peak * num_steps / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        rest = max((self.total_steps or 0) - self.warmup_steps, 1)
        progress = min((num_steps - self.warmup_steps) / rest, 1.0)
        return self.peak * 0.5 * (1 + math.cos(math.pi * progress))
