"""What the policy's loss takes from a teacher: one more term, or advantages token by token.

Legend: B rows (trajectories) of a micro-batch, T response positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rlcore.algorithms import (
    PolicyLossInputs,
    distillation_advantages,
    distillation_loss,
    distillation_pg_loss,
    kl_estimate,
    masked_mean,
)
from rlcore.config import RunConfig
from rlcore.config.arguments import arguments

TEACHER_COLUMN = "teacher_logprobs"


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillationSpec:
    """The teacher, and how it is learnt from."""

    teacher_path: str
    """Its folder."""
    is_policy_gradient: bool = False
    """Minus the estimate is the advantage of its token; False: the estimate is the loss."""
    has_task_loss: bool = True
    """Whether the policy loss of the rewards is trained on, too."""
    coef: float = 1.0
    """Weight of the term."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of `distillation_pg_loss` or `distillation_loss`."""

    @classmethod
    def from_config(cls, config: RunConfig) -> "DistillationSpec | None":
        """Return what a configuration asks for; None: nothing is distilled."""
        loss, path = config.distillation.distillation_loss, config.teacher_path
        if path is None:
            return None
        is_gradient = loss.use_policy_gradient
        return cls(
            teacher_path=path,
            is_policy_gradient=is_gradient,
            has_task_loss=config.learns_from_rewards,
            coef=loss.distillation_loss_coef if config.learns_from_rewards else 1.0,
            settings=arguments(config, "distillation_pg_loss")
            if is_gradient
            else arguments(config, "distillation_loss"),
        )

    def term(
        self, inputs: PolicyLossInputs, mask: Tensor, teacher: Tensor, agg_kw: dict[str, Any]
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the term, without its weight, and means over the tokens that take part.

        Args:
            inputs: Of the policy loss, which may have dropped tokens in bypass mode: a policy
                gradient does without them, too.
            mask: Valid tokens, [B, T], of a loss: it is on all of them, as the KL from the
                reference is.
            teacher: The teacher's log-probs, [B, T].
            agg_kw: Totals of the optimizer step.
        """
        settings = {**self.settings, "agg_kw": agg_kw}
        part = {name: settings[name] for name in ("kind", "value_clamp") if name in settings}
        if self.is_policy_gradient:
            loss = distillation_pg_loss(
                inputs.old_logp,
                inputs.logp,
                teacher,
                inputs.mask,
                is_weights=inputs.is_weights,
                **settings,
            )
            values = distillation_advantages(inputs.old_logp, teacher, mask, **part)
        else:
            loss = distillation_loss(inputs.logp, teacher, mask, **settings)
            values = kl_estimate(inputs.logp.detach(), teacher, mask, **part)
        return loss, {"distillation/abs_loss": masked_mean(values.abs(), mask).item()}
