"""Section `distillation`: a frozen teacher that the policy learns from, on its own responses."""

from typing import Any

from pydantic import Field, model_validator

from rlcore.config.actor import KLKind
from rlcore.config.base import Factor, LogProb, PathText, Section, falls_back


class TeacherModelConfig(Section):
    """One teacher."""

    model_path: PathText | None = None
    """Folder of the teacher, in Hugging Face format, with the policy's tokenizer."""


class TeacherModelsConfig(Section):
    """The teachers: one, under verl's name for a single one."""

    teacher_model: TeacherModelConfig = Field(default_factory=TeacherModelConfig)
    """The teacher."""


class DistillationLossConfig(Section):
    """What is learnt from the teacher's log-probs of the sampled tokens."""

    loss_mode: KLKind = "k3"
    """Estimator of KL(policy || teacher) from the sampled token."""
    use_task_rewards: bool = True
    """Add the policy loss of the task's rewards; false: the teacher alone."""
    distillation_loss_coef: Factor = Field(default=1.0, ge=0)
    """Weight of the distillation loss beside that policy loss."""
    loss_max_clamp: LogProb | None = Field(default=None, gt=0)
    """Largest size of the estimate per token; null: none."""
    use_policy_gradient: bool = False
    """Take minus the estimate for the advantage of its token, in a clipped policy loss; false: the
    estimate is the loss."""
    clip_ratio: Factor = Field(default=0.2, ge=0)
    """Clip of that loss's ratio on both sides, where `_low` or `_high` says nothing else."""
    clip_ratio_low: Factor = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped at 1 - this; not set: `clip_ratio` (verl: always 0.2)."""
    clip_ratio_high: Factor = Field(default=0.2, ge=0)
    """The ratio is clipped at 1 + this; not set: `clip_ratio` (verl: always 0.2)."""

    @model_validator(mode="before")
    @classmethod
    def _clip_ratio_fills_low_and_high(cls, values: Any) -> Any:
        # As in section actor, where the reason is told.
        return falls_back(values, "clip_ratio", "clip_ratio_low", "clip_ratio_high")


class DistillationConfig(Section):
    """On-policy distillation from one frozen teacher, which lies in the training workers."""

    enabled: bool = False
    """Learn from a teacher."""
    teacher_models: TeacherModelsConfig = Field(default_factory=TeacherModelsConfig)
    """The teacher."""
    distillation_loss: DistillationLossConfig = Field(default_factory=DistillationLossConfig)
    """What is learnt from it."""
