"""Rules about what only some runs have: critic, reference, teacher, adapters. Keys need them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from rlcore.config.problems import Problem
from rlcore.config.run import RunConfig
from rlcore.config.tree import default_of, honoured_fields, value_at

_ACTOR: Final = "actor_rollout_ref.actor."
_MODEL: Final = "actor_rollout_ref.model."


@dataclass(frozen=True, kw_only=True, slots=True)
class _Feature:
    """Something that a run has or has not."""

    is_there: Callable[[RunConfig], bool]
    beginnings: tuple[str, ...]
    """Of the keys that only it reads."""
    reason: str
    fix: str
    switches: tuple[str, ...]


_FEATURES: Final = (
    _Feature(
        is_there=lambda config: config.needs_critic,
        beginnings=("critic.", "trainer.critic_warmup"),
        reason="it has no effect: this run trains no critic",
        fix="leave it out, or set algorithm.adv_estimator=gae",
        switches=("critic.enable", "algorithm.adv_estimator"),
    ),
    _Feature(
        is_there=lambda config: config.actor_rollout_ref.actor.use_kl_loss,
        beginnings=(f"{_ACTOR}kl_loss_",),
        reason="it has no effect: the loss has no KL",
        fix=f"leave it out, or set {_ACTOR}use_kl_loss=true",
        switches=(f"{_ACTOR}use_kl_loss",),
    ),
    _Feature(
        is_there=lambda config: config.algorithm.use_kl_in_reward,
        beginnings=("algorithm.kl_ctrl.", "algorithm.kl_penalty"),
        reason="it has no effect: the reward has no KL",
        fix="leave it out, or set algorithm.use_kl_in_reward=true",
        switches=("algorithm.use_kl_in_reward",),
    ),
    _Feature(
        is_there=lambda config: config.needs_reference,
        beginnings=("actor_rollout_ref.ref.",),
        reason="it has no effect: nothing in this run compares with a reference",
        fix=f"leave it out, or set {_ACTOR}use_kl_loss=true",
        switches=(f"{_ACTOR}use_kl_loss", "algorithm.use_kl_in_reward"),
    ),
    _Feature(
        is_there=lambda config: config.distillation.enabled,
        beginnings=("distillation.",),
        reason="it has no effect: nothing is distilled",
        fix="leave it out, or set distillation.enabled=true",
        switches=("distillation.enabled",),
    ),
    _Feature(
        is_there=lambda config: config.actor_rollout_ref.model.lora_rank > 0,
        beginnings=(
            f"{_MODEL}lora_alpha",
            f"{_MODEL}target_modules",
            f"{_MODEL}exclude_modules",
            f"{_MODEL}lora.",
        ),
        reason=f"it has no effect with {_MODEL}lora_rank=0",
        fix=f"leave it out, or set {_MODEL}lora_rank",
        switches=(f"{_MODEL}lora_rank",),
    ),
)


def keys_have_their_feature(config: RunConfig) -> Iterator[Problem]:
    """A key that only a critic, a reference, a teacher or an adapter reads needs it."""
    for feature in _FEATURES:
        if feature.is_there(config):
            continue
        for path in honoured_fields():
            is_read = path.startswith(feature.beginnings) and path not in feature.switches
            value = value_at(config, path) if is_read else None
            asks_for_nothing = path.endswith("coef") and value == 0
            if is_read and value != default_of(path) and not asks_for_nothing:
                yield Problem(
                    path=path,
                    value=value,
                    reason=feature.reason,
                    fix=feature.fix,
                    involves=feature.switches,
                )


def critic_is_cut_by_something(config: RunConfig) -> Iterator[Problem]:
    """Without tokens as limit the critic needs trajectories as one."""
    critic, actor = config.critic, config.actor_rollout_ref.actor
    sizes = (critic.ppo_micro_batch_size_per_gpu, actor.ppo_micro_batch_size_per_gpu)
    if config.needs_critic and not config.critic_is_by_tokens and sizes == (None, None):
        yield Problem(
            path="critic.ppo_micro_batch_size_per_gpu",
            reason="nothing says how the critic's mini-batches are cut to fit into memory",
            fix="set it, or critic.use_dynamic_bsz=true",
            involves=("critic.use_dynamic_bsz", f"{_ACTOR}use_dynamic_bsz"),
        )


RULES = (critic_is_cut_by_something, keys_have_their_feature)
