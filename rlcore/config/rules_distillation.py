"""Rules about a teacher: it is named, its estimator fits its use, and keys have an effect."""

from collections.abc import Iterator
from typing import Final

from rlcore.config.problems import Problem
from rlcore.config.run import RunConfig
from rlcore.config.tree import default_of

_D: Final = "distillation."
_LOSS: Final = f"{_D}distillation_loss."
_PATH: Final = f"{_D}teacher_models.teacher_model.model_path"
_GRADIENT: Final = f"{_LOSS}use_policy_gradient"


def teacher_is_named(config: RunConfig) -> Iterator[Problem]:
    """Distillation needs a teacher."""
    distillation = config.distillation
    if distillation.enabled and distillation.teacher_models.teacher_model.model_path is None:
        yield Problem(
            path=_PATH,
            has_value=False,
            reason=f"{_D}enabled=true needs it",
            fix="set it to the folder of the teacher, in Hugging Face format",
            involves=(f"{_D}enabled",),
        )


def estimator_fits_its_use(config: RunConfig) -> Iterator[Problem]:
    """An estimator teaches as a loss by its gradient, as an advantage by its value."""
    loss = config.distillation.distillation_loss
    if not config.distillation.enabled:
        return
    if loss.loss_mode in {"k1", "kl"} and not loss.use_policy_gradient:
        yield Problem(
            path=f"{_LOSS}loss_mode",
            value=loss.loss_mode,
            reason="as a loss its gradient does not depend on the teacher (verl refuses it, too)",
            fix=f"set {_GRADIENT}=true, or loss_mode to k1+, k2 or k3",
            involves=(_GRADIENT,),
        )
    if loss.loss_mode in {"k1+", "k3+"} and loss.use_policy_gradient:
        plain = loss.loss_mode.removesuffix("+")
        yield Problem(
            path=f"{_LOSS}loss_mode",
            value=loss.loss_mode,
            reason=f"an advantage has no gradient of its own: with {_GRADIENT}=true it is {plain}",
            fix=f"set it to {plain}",
            involves=(_GRADIENT,),
        )


def keys_of_the_loss_have_an_effect(config: RunConfig) -> Iterator[Problem]:
    """The weight needs something beside it, the clips a ratio."""
    loss = config.distillation.distillation_loss
    if not config.distillation.enabled:  # told by rules_training, for all keys of the section
        return
    if not loss.use_task_rewards and loss.distillation_loss_coef != 1:
        yield Problem(
            path=f"{_LOSS}distillation_loss_coef",
            value=loss.distillation_loss_coef,
            reason=f"it has no effect with {_LOSS}use_task_rewards=false: the weight is 1",
            fix="leave it out",
            is_idle=True,
            involves=(f"{_LOSS}use_task_rewards",),
        )
    if loss.use_policy_gradient:
        return
    for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
        value = getattr(loss, name)
        is_filled = name != "clip_ratio" and value == loss.clip_ratio
        if value != default_of(f"{_LOSS}{name}") and not is_filled:
            yield Problem(
                path=f"{_LOSS}{name}",
                value=value,
                reason=f"it has no effect with {_GRADIENT}=false: no ratio is clipped",
                fix="leave it out",
                is_idle=True,
                involves=(_GRADIENT,),
            )


RULES = (teacher_is_named, estimator_fits_its_use, keys_of_the_loss_have_an_effect)
