"""Rules between keys of section `reward`."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlcore.config.problems import Problem

if TYPE_CHECKING:
    from rlcore.config.run import RunConfig

_RESERVED = ("score", "acc")
_LIMITED = ("limited", "rate_limited")
# One of the user's own may read what it likes.
_WITHOUT_LIMITS = ("dapo", "naive")


def one_kind_of_reward_function(config: "RunConfig") -> Iterator[Problem]:
    """`reward.functions` takes the place of `custom_reward_function`; its names are unique."""
    reward = config.reward
    if reward.functions and reward.custom_reward_function.path is not None:
        yield Problem(
            path="reward.custom_reward_function.path",
            value=reward.custom_reward_function.path,
            reason="it has no effect beside reward.functions",
            fix="make it one of reward.functions, or leave those out",
            involves=("reward.functions",),
        )
    names = [part.name for part in reward.functions]
    for name in sorted({name for name in names if names.count(name) > 1 or name in _RESERVED}):
        yield Problem(
            path="reward.functions",
            has_value=False,
            reason=f"the name {name} is {'reserved' if name in _RESERVED else 'given twice'}",
            fix="give each reward a name of its own, such as correct and brief",
        )


def overlong_penalty_needs_its_manager(config: "RunConfig") -> Iterator[Problem]:
    """`reward.reward_kwargs` belongs to the manager `dapo`."""
    name = config.reward.reward_manager.name
    if config.reward.reward_kwargs.overlong_buffer_cfg.enable and name in {"naive", *_LIMITED}:
        yield Problem(
            path="reward.reward_kwargs.overlong_buffer_cfg.enable",
            value=True,
            reason=f"it has no effect with reward.reward_manager.name={name}",
            fix="set reward.reward_manager.name=dapo, or leave it out",
            involves=("reward.reward_manager.name",),
        )


def rate_limits_need_their_manager(config: "RunConfig") -> Iterator[Problem]:
    """`max_concurrent`, `max_rpm` and `max_tpm` belong to the manager `rate_limited`."""
    reward = config.reward
    if reward.reward_manager.name not in _WITHOUT_LIMITS:
        return
    for name, neutral in (("max_concurrent", 1), ("max_rpm", None), ("max_tpm", None)):
        value = getattr(reward, name)
        if value != neutral:
            yield Problem(
                path=f"reward.{name}",
                value=value,
                reason=(
                    f"it has no effect with reward.reward_manager.name={reward.reward_manager.name}"
                ),
                fix="set reward.reward_manager.name=rate_limited, or leave it out",
                involves=("reward.reward_manager.name",),
            )


def late_rewards_have_no_parts(config: "RunConfig") -> Iterator[Problem]:
    """A reward model without a pool scores complete batches; only the score is kept with rows."""
    model = config.reward.reward_model
    if model.enable and not model.enable_resource_pool and config.algorithm.gdpo_reward_keys:
        yield Problem(
            path="algorithm.gdpo_reward_keys",
            value=config.algorithm.gdpo_reward_keys,
            reason=(
                "reward.reward_model.enable_resource_pool=false scores complete batches, of whose "
                "rewards the rows keep the score alone"
            ),
            fix="set reward.reward_model.enable_resource_pool=true",
            involves=("reward.reward_model.enable", "reward.reward_model.enable_resource_pool"),
        )


def late_rewards_have_no_baseline(config: "RunConfig") -> Iterator[Problem]:
    """ReMax's greedy response is scored while its group's sessions end, and is not stored."""
    model = config.reward.reward_model
    if model.enable and not model.enable_resource_pool and config.needs_baseline:
        yield Problem(
            path="algorithm.adv_estimator",
            value=config.algorithm.adv_estimator,
            reason=(
                "reward.reward_model.enable_resource_pool=false scores complete batches, in which "
                "the greedy response is not"
            ),
            fix="set reward.reward_model.enable_resource_pool=true",
            involves=("reward.reward_model.enable", "reward.reward_model.enable_resource_pool"),
        )


REWARD_RULES = (
    late_rewards_have_no_baseline,
    late_rewards_have_no_parts,
    one_kind_of_reward_function,
    overlong_penalty_needs_its_manager,
    rate_limits_need_their_manager,
)
