"""Rules about estimators, losses, KL, the critic and rollout correction."""

from collections.abc import Iterator
from typing import Final

from rlcore.config.argument_table import ESTIMATORS, GROUP_ESTIMATORS, LOSSES
from rlcore.config.arguments import keys_of, keys_read_by
from rlcore.config.corrections import OPTIONS, read_threshold, split_options, split_thresholds
from rlcore.config.problems import Problem
from rlcore.config.run import RunConfig
from rlcore.config.tree import default_of, value_at

_ACTOR: Final = "actor_rollout_ref.actor."
_ESTIMATOR: Final = "algorithm.adv_estimator"
_LOSS: Final = f"{_ACTOR}policy_loss.loss_mode"
_CORRECTION: Final = "algorithm.rollout_correction."
_WITHOUT_OLD: Final = frozenset({"reinforce_loss"})
"""Losses that read no log-probs of an older policy."""


def group_has_two_sessions(config: RunConfig) -> Iterator[Problem]:
    """Group estimators compare the sessions of a prompt."""
    n, name = config.actor_rollout_ref.rollout.n, config.algorithm.adv_estimator
    if not config.learns_from_rewards and name != "grpo_passk":  # which has no number for one
        return
    if ESTIMATORS.get(name) in GROUP_ESTIMATORS and n < 2 and not config.trainer.val_only:
        yield Problem(
            path="actor_rollout_ref.rollout.n",
            value=n,
            reason=(
                f"{name} compares the sessions of one prompt with each other and needs at least 2 "
                f"(algorithm.adv_estimator={name})"
            ),
            fix="set it to 8, for instance",
            involves=(_ESTIMATOR, "trainer.val_only"),
        )


def estimator_and_loss_read_their_keys(config: RunConfig) -> Iterator[Problem]:
    """A key of another estimator or another loss has no effect."""
    estimator = config.algorithm.adv_estimator
    loss, loss_key, loss_name = _loss_of(config)
    chosen = (
        (ESTIMATORS.get(estimator), ESTIMATORS, _ESTIMATOR, estimator),
        (loss, LOSSES, loss_key, loss_name),
    )
    for function, functions, key, name in chosen:
        if function is None:  # one of the user's, which may read what it likes
            continue
        read = keys_read_by(function)
        if config.actor_rollout_ref.actor.entropy_coeff or config.distillation.enabled:
            read |= {f"{_ACTOR}loss_agg_mode"}  # other terms of the loss are aggregated, too
        for path in sorted(keys_of(functions) - read):
            value = value_at(config, path)
            if value != default_of(path):
                yield Problem(
                    path=path,
                    value=value,
                    reason=f"it has no effect with {key}={name}",
                    fix="leave it out",
                    is_idle=True,
                    involves=(key,),
                )


def _loss_of(config: RunConfig) -> tuple[str | None, str, str]:
    """Return the function of the policy loss, and the key and value that choose it."""
    correction = config.algorithm.rollout_correction
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if correction.bypass_mode and correction.loss_type == "reinforce":
        return "reinforce_loss", f"{_CORRECTION}loss_type", "reinforce"
    if correction.bypass_mode and mode == "bypass_mode":
        return "ppo_loss", _LOSS, mode
    return LOSSES.get(mode), _LOSS, mode


def critic_and_estimator_agree(config: RunConfig) -> Iterator[Problem]:
    """GAE needs the critic; nothing else reads it."""
    name, enable = config.algorithm.adv_estimator, config.critic.enable
    if name == "gae" and enable is False:
        yield Problem(
            path="critic.enable",
            value=enable,
            reason=f"it contradicts {_ESTIMATOR}=gae, which needs values",
            fix="leave it out, or choose another estimator",
            involves=(_ESTIMATOR,),
        )
    if name in ESTIMATORS and name != "gae" and enable:
        yield Problem(
            path="critic.enable",
            value=enable,
            reason=f"{_ESTIMATOR}={name} reads no values",
            fix="leave it out, or set algorithm.adv_estimator=gae",
            involves=(_ESTIMATOR,),
        )


def scale_factor_needs_its_mode(config: RunConfig) -> Iterator[Problem]:
    """`loss_scale_factor` divides in one aggregation mode only."""
    actor = config.actor_rollout_ref.actor
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield Problem(
            path=f"{_ACTOR}loss_scale_factor",
            value=actor.loss_scale_factor,
            reason=f"it has no effect with loss_agg_mode={actor.loss_agg_mode}",
            fix="leave it out, or set loss_agg_mode=seq-mean-token-sum-norm",
            involves=(f"{_ACTOR}loss_agg_mode",),
        )


def warm_up_is_given_once(config: RunConfig) -> Iterator[Problem]:
    """Warm-up is a number of steps or a share, not both."""
    optims = (
        (f"{_ACTOR}optim", config.actor_rollout_ref.actor.optim),
        ("critic.optim", config.critic.optim),
    )
    for section, optim in optims:
        if optim.lr_warmup_steps >= 0 and optim.lr_warmup_steps_ratio > 0:
            yield Problem(
                path=f"{section}.lr_warmup_steps_ratio",
                value=optim.lr_warmup_steps_ratio,
                reason=f"it contradicts lr_warmup_steps={optim.lr_warmup_steps}",
                fix="give one of the two",
                involves=(f"{section}.lr_warmup_steps",),
            )


def gdpo_names_its_rewards(config: RunConfig) -> Iterator[Problem]:
    """GDPO combines named rewards, with as many weights as names."""
    algorithm = config.algorithm
    keys, weights = algorithm.gdpo_reward_keys, algorithm.gdpo_reward_weights
    if algorithm.adv_estimator == "gdpo" and not keys:
        yield Problem(
            path="algorithm.gdpo_reward_keys",
            value=keys,
            reason=f"{_ESTIMATOR}=gdpo combines named rewards",
            fix="set it to keys that the reward function returns",
            involves=(_ESTIMATOR,),
        )
    if keys and weights and len(keys) != len(weights):
        yield Problem(
            path="algorithm.gdpo_reward_weights",
            value=weights,
            reason=f"{len(weights)} weights for {len(keys)} algorithm.gdpo_reward_keys",
            fix="give one weight per key",
            involves=("algorithm.gdpo_reward_keys",),
        )


def filter_has_its_rewards(config: RunConfig) -> Iterator[Problem]:
    """The rewards that `filter_groups` looks at are there while groups finish."""
    groups, model = config.algorithm.filter_groups, config.reward.reward_model
    if not groups.enable:
        return
    if model.enable and not model.enable_resource_pool:
        yield Problem(
            path="algorithm.filter_groups.enable",
            value=True,
            reason=(
                "groups are filtered as they finish, but reward.reward_model.enable_resource_pool="
                "false scores them after the batch is complete"
            ),
            fix="set reward.reward_model.enable_resource_pool=true",
            involves=("reward.reward_model.enable", "reward.reward_model.enable_resource_pool"),
        )


def thresholds_can_be_read(config: RunConfig) -> Iterator[Problem]:
    """Options and thresholds of rollout correction are verl's words."""
    correction = config.algorithm.rollout_correction
    try:
        read_threshold(correction.rollout_is_threshold)
    except ValueError as error:
        yield Problem(
            path=f"{_CORRECTION}rollout_is_threshold",
            value=correction.rollout_is_threshold,
            reason=str(error),
            fix='set it to 2.0, or to "0.5_2.0"',
        )
    options = split_options(correction.rollout_rs)
    wrong = [option for option in options if option not in OPTIONS]
    if wrong:
        yield Problem(
            path=f"{_CORRECTION}rollout_rs",
            value=correction.rollout_rs,
            reason=f"there is no option {', '.join(wrong)}",
            fix=f"choose from {', '.join(OPTIONS)}",
        )
    try:
        for text in split_thresholds(correction.rollout_rs_threshold, len(options)):
            read_threshold(text)
    except ValueError as error:
        yield Problem(
            path=f"{_CORRECTION}rollout_rs_threshold",
            value=correction.rollout_rs_threshold,
            reason=f"{error}; {_CORRECTION}rollout_rs={correction.rollout_rs}",
            fix="give one threshold, or one per option, separated by commas",
            involves=(f"{_CORRECTION}rollout_rs",),
        )
    if not options and correction.rollout_rs_threshold is not None:
        yield Problem(
            path=f"{_CORRECTION}rollout_rs_threshold",
            value=correction.rollout_rs_threshold,
            reason=f"it has no effect without {_CORRECTION}rollout_rs",
            fix="leave it out",
            involves=(f"{_CORRECTION}rollout_rs",),
        )


def bypass_has_a_loss_that_uses_it(config: RunConfig) -> Iterator[Problem]:
    """`bypass_mode` replaces the old log-probs: a loss must read them, and be the only one."""
    correction = config.algorithm.rollout_correction
    name = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if name == "bypass_mode" and not correction.bypass_mode:
        yield Problem(
            path=_LOSS,
            value=name,
            reason=f"it contradicts {_CORRECTION}bypass_mode=false",
            fix=f"set {_CORRECTION}bypass_mode=true alone: the loss follows",
            involves=(f"{_CORRECTION}bypass_mode",),
        )
    if not correction.bypass_mode:
        if correction.loss_type != "ppo_clip":
            yield _without_bypass(correction.loss_type)
        return
    if LOSSES.get(name) in _WITHOUT_OLD and correction.loss_type == "ppo_clip":
        yield Problem(
            path=f"{_CORRECTION}bypass_mode",
            value=True,
            reason=f"it has no effect: {_LOSS}={name} reads no old log-probs",
            fix="leave it out, or choose another loss",
            involves=(_LOSS,),
        )
    if name not in {"vanilla", "bypass_mode", "reinforce", "gpg"} and (
        correction.loss_type == "reinforce"
    ):
        yield Problem(
            path=f"{_CORRECTION}loss_type",
            value=correction.loss_type,
            reason=f"it contradicts {_LOSS}={name}: there can be one loss",
            fix=f"leave one of the two out (loss_type=ppo_clip keeps {name})",
            involves=(_LOSS, f"{_CORRECTION}bypass_mode"),
        )
    if correction.rollout_is is not None and correction.loss_type == "ppo_clip":
        yield Problem(
            path=f"{_CORRECTION}rollout_is",
            value=correction.rollout_is,
            reason=(
                f"with {_CORRECTION}bypass_mode=true and loss_type=ppo_clip the ratio is against "
                "the engine's policy already: a weight would count the gap twice"
            ),
            fix="leave it out, or set loss_type=reinforce",
            involves=(f"{_CORRECTION}bypass_mode", f"{_CORRECTION}loss_type"),
        )


def _without_bypass(loss_type: str) -> Problem:
    return Problem(
        path=f"{_CORRECTION}loss_type",
        value=loss_type,
        reason=f"it has no effect with {_CORRECTION}bypass_mode=false",
        fix="leave it out, or set bypass_mode=true",
        involves=(f"{_CORRECTION}bypass_mode",),
    )


def weights_are_counted_once(config: RunConfig) -> Iterator[Problem]:
    """Importance weights have options only where there are weights, and no second one beside."""
    correction = config.algorithm.rollout_correction
    name = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if correction.rollout_is is None:
        for key in ("rollout_is_threshold", "rollout_is_batch_normalize"):
            value = getattr(correction, key)
            if value != default_of(f"{_CORRECTION}{key}"):
                yield Problem(
                    path=f"{_CORRECTION}{key}",
                    value=value,
                    reason=f"it has no effect without {_CORRECTION}rollout_is",
                    fix="leave it out, or set rollout_is=token",
                    involves=(f"{_CORRECTION}rollout_is",),
                )
    elif name == "decoupled_ppo":
        yield Problem(
            path=f"{_CORRECTION}rollout_is",
            value=correction.rollout_is,
            reason=f"{_LOSS}=decoupled_ppo has a weight for the same gap: it would count twice",
            fix="leave it out (policy_loss.decoupled_cap bounds that weight), or take vanilla",
            involves=(_LOSS,),
        )
    if correction.bypass_mode and correction.rollout_is_batch_normalize:
        yield Problem(
            path=f"{_CORRECTION}rollout_is_batch_normalize",
            value=True,
            reason=(
                f"with {_CORRECTION}bypass_mode=true the loss makes the weights, and sees one "
                "micro-batch at a time"
            ),
            fix="leave it out",
            involves=(f"{_CORRECTION}bypass_mode",),
        )
    if correction.bypass_mode and name == "decoupled_ppo":
        yield Problem(
            path=_LOSS,
            value=name,
            reason=(
                f"it tells the engine's policy from that at the start of the step, which "
                f"{_CORRECTION}bypass_mode=true takes for one"
            ),
            fix="leave one of the two out",
            involves=(f"{_CORRECTION}bypass_mode",),
        )


def lora_keys_need_a_rank(config: RunConfig) -> Iterator[Problem]:
    """An adapter to go on from has a rank."""
    model = config.actor_rollout_ref.model
    if model.lora_adapter_path is not None and model.lora_rank == 0:
        yield Problem(
            path="actor_rollout_ref.model.lora_adapter_path",
            value=model.lora_adapter_path,
            reason="it contradicts actor_rollout_ref.model.lora_rank=0",
            fix="set lora_rank to the adapter's rank",
            involves=("actor_rollout_ref.model.lora_rank",),
        )


RULES = (
    group_has_two_sessions,
    estimator_and_loss_read_their_keys,
    critic_and_estimator_agree,
    scale_factor_needs_its_mode,
    warm_up_is_given_once,
    gdpo_names_its_rewards,
    filter_has_its_rewards,
    thresholds_can_be_read,
    bypass_has_a_loss_that_uses_it,
    weights_are_counted_once,
    lora_keys_need_a_rank,
)
