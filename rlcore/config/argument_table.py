"""From verl's keys to the arguments of `rlcore.algorithms`: one table, read by people and by code.

The README's table is rendered from these rows, and `rlcore.config.arguments` reads them. A row says
where the value comes from, how it is converted, and, where the result differs from verl's, what
verl does and which setting restores it. One file, though a long one: it is one table.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from rlcore.config.actor import SEQUENCE_LOSSES
from rlcore.config.corrections import importance_weights, rejections
from rlcore.config.run import RunConfig

_ALGORITHM: Final = "algorithm."
_ACTOR: Final = "actor_rollout_ref.actor."
_CORRECTION: Final = "algorithm.rollout_correction."
_DISTILLATION: Final = "distillation.distillation_loss."

ESTIMATORS: dict[str, str] = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "dr_grpo": "dr_grpo",
    "grpo_passk": "grpo_passk",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gpg": "gpg",
    "gdpo": "gdpo",
    "remax": "remax",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_pp": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "reinforce_pp_baseline": "reinforce_pp_baseline",
}
"""Function of every name of `algorithm.adv_estimator`; some names are aliases."""

GROUP_ESTIMATORS: frozenset[str] = frozenset(
    {"grpo", "dr_grpo", "grpo_passk", "rloo", "opo", "gpg", "gdpo", "reinforce_pp_baseline"}
)
"""Functions that compare the sessions of a prompt with each other."""

LOSSES: dict[str, str] = {
    "vanilla": "ppo_loss",
    "gspo": "gspo_loss",
    "cispo": "cispo_loss",
    "sapo": "sapo_loss",
    "gpg": "reinforce_loss",
    "reinforce": "reinforce_loss",
    "geo_mean": "gmpo_loss",
    "gmpo": "gmpo_loss",
    "decoupled_ppo": "decoupled_ppo_loss",
}
"""Function of every name of `actor.policy_loss.loss_mode`."""

KL_KINDS: dict[str, str] = {
    "kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3",
    "k1+": "k1+", "k3+": "k3+",
}  # fmt: skip
"""`kind` of `kl_estimate` for verl's names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Argument:
    """Where one keyword argument of one function comes from."""

    function: str
    """Of rlcore.algorithms."""
    name: str
    """Its keyword argument."""
    key: str | None
    """Dotted key; None: the same in every configuration."""
    value: Callable[[RunConfig], Any]
    """Reads it out of a configuration."""
    conversion: str = ""
    """How the key's value becomes the argument; empty: as it is."""
    verl: str = ""
    """What verl does otherwise; empty: the same."""
    restore: str = ""
    """The setting that restores verl's behaviour."""


def _row(
    function: str,
    name: str,
    key: str | None,
    value: Callable[[RunConfig], Any],
    **words: str,
) -> Argument:
    return Argument(function=function, name=name, key=key, value=value, **words)


def _singleton(function: str) -> Argument:
    return _row(
        function,
        "singleton",
        f"{_ALGORITHM}singleton",
        lambda config: config.algorithm.singleton,
        verl="a group of one has its score as advantage",
        restore="algorithm.singleton=raw",
    )


def _norm_by_std(function: str) -> Argument:
    return _row(
        function,
        "norm_by_std",
        f"{_ALGORITHM}norm_adv_by_std_in_grpo",
        lambda config: config.algorithm.norm_adv_by_std_in_grpo,
    )


def _gamma(function: str) -> Argument:
    return _row(function, "gamma", f"{_ALGORITHM}gamma", lambda config: config.algorithm.gamma)


def _clips(function: str) -> list[Argument]:
    def row(name: str, key: str, value: Callable[[RunConfig], float]) -> Argument:
        return _row(
            function,
            name,
            f"{_ACTOR}{key}",
            value,
            conversion="not set: clip_ratio",
            verl="clip_ratio alone has no effect",
            restore="set clip_ratio_low and clip_ratio_high",
        )

    return [
        row("clip_low", "clip_ratio_low", lambda c: c.actor_rollout_ref.actor.clip_ratio_low),
        row("clip_high", "clip_ratio_high", lambda c: c.actor_rollout_ref.actor.clip_ratio_high),
    ]


def _dual_clip(function: str) -> Argument:
    return _row(
        function,
        "dual_clip",
        f"{_ACTOR}clip_ratio_c",
        lambda config: config.actor_rollout_ref.actor.clip_ratio_c,
    )


def _agg(function: str) -> Argument:
    is_sequence = function in {LOSSES[name] for name in SEQUENCE_LOSSES}
    # verl's SAPO averages per sequence as well, and leaves no choice.
    differs = function == "gspo_loss"
    return _row(
        function,
        "agg",
        f"{_ACTOR}loss_agg_mode",
        lambda config: config.actor_rollout_ref.actor.loss_agg_mode,
        conversion="not set: seq-mean-token-mean" if is_sequence else "",
        verl="not set: token-mean" if differs else "",
        restore="actor.loss_agg_mode=token-mean" if differs else "",
    )


def _value_clamp(config: RunConfig) -> float | None:
    actor = config.actor_rollout_ref.actor
    return actor.kl_loss_value_clamp if KL_KINDS[actor.kl_loss_type] == "k3" else None


def _distillation(function: str) -> list[Argument]:
    return [
        _row(
            function,
            "kind",
            f"{_DISTILLATION}loss_mode",
            lambda config: KL_KINDS[config.distillation.distillation_loss.loss_mode],
            conversion="kl → k1, mse → k2, low_var_kl → k3",
        ),
        _row(
            function,
            "value_clamp",
            f"{_DISTILLATION}loss_max_clamp",
            lambda config: config.distillation.distillation_loss.loss_max_clamp,
            verl="null: low_var_kl and k3 are cut at 10",
            restore="loss_max_clamp=10",
        ),
    ]


_ESTIMATOR_ROWS: tuple[Argument, ...] = (
    _gamma("gae"),
    _row("gae", "lam", f"{_ALGORITHM}lam", lambda config: config.algorithm.lam),
    _row("gae", "whiten", None, lambda _: True, conversion="always, as verl"),
    _norm_by_std("grpo"),
    _singleton("grpo"),
    _singleton("dr_grpo"),
    _norm_by_std("grpo_passk"),
    _singleton("rloo"),
    _singleton("opo"),
    _row(
        "gpg",
        "alpha_mode",
        f"{_ALGORITHM}gpg_alpha_mode",
        lambda config: config.algorithm.gpg_alpha_mode,
        verl="rows with a non-zero score count",
        restore="algorithm.gpg_alpha_mode=nonzero_scores",
    ),
    _singleton("gpg"),
    _row(
        "gdpo",
        "weights",
        f"{_ALGORITHM}gdpo_reward_weights",
        lambda config: config.algorithm.gdpo_reward_weights,
        conversion="columns: algorithm.gdpo_reward_keys",
    ),
    _norm_by_std("gdpo"),
    _row(
        "gdpo",
        "batch_norm",
        f"{_ALGORITHM}gdpo_batch_norm",
        lambda config: config.algorithm.gdpo_batch_norm,
        verl="every token has a vote, so long responses weigh more",
        restore="algorithm.gdpo_batch_norm=token",
    ),
    _singleton("gdpo"),
    _gamma("reinforce_pp"),
    _row("reinforce_pp", "whiten", None, lambda _: True, conversion="always, as verl"),
    _singleton("reinforce_pp_baseline"),
    _row("reinforce_pp_baseline", "whiten", None, lambda _: True, conversion="always, as verl"),
)

_LOSS_ROWS: tuple[Argument, ...] = (
    *_clips("ppo_loss"),
    _dual_clip("ppo_loss"),
    _agg("ppo_loss"),
    *_clips("gspo_loss"),
    _agg("gspo_loss"),
    _row(
        "cispo_loss",
        "ratio_min",
        f"{_ACTOR}clip_ratio_low",
        lambda config: 1 - config.actor_rollout_ref.actor.clip_ratio_low,
        conversion="1 - clip_ratio_low",
    ),
    _row(
        "cispo_loss",
        "ratio_max",
        f"{_ACTOR}clip_ratio_high",
        lambda config: 1 + config.actor_rollout_ref.actor.clip_ratio_high,
        conversion="1 + clip_ratio_high",
    ),
    _agg("cispo_loss"),
    _row("sapo_loss", "tau_pos", f"{_ACTOR}tau_pos", lambda c: c.actor_rollout_ref.actor.tau_pos),
    _row("sapo_loss", "tau_neg", f"{_ACTOR}tau_neg", lambda c: c.actor_rollout_ref.actor.tau_neg),
    _agg("sapo_loss"),
    _agg("reinforce_loss"),
    *_clips("gmpo_loss"),
    *_clips("decoupled_ppo_loss"),
    _dual_clip("decoupled_ppo_loss"),
    _row(
        "decoupled_ppo_loss",
        "cap",
        f"{_ACTOR}policy_loss.decoupled_cap",
        lambda config: config.actor_rollout_ref.actor.policy_loss.decoupled_cap,
    ),
    _row(
        "decoupled_ppo_loss",
        "cap_mode",
        f"{_ACTOR}policy_loss.decoupled_cap_mode",
        lambda config: config.actor_rollout_ref.actor.policy_loss.decoupled_cap_mode,
    ),
    _agg("decoupled_ppo_loss"),
)

_OTHER_ROWS: tuple[Argument, ...] = (
    _row(
        "agg_loss",
        "loss_scale_factor",
        f"{_ACTOR}loss_scale_factor",
        lambda c: c.actor_rollout_ref.actor.loss_scale_factor or float(c.data.max_response_length),
        conversion="null: data.max_response_length",
        verl="null: the width of the padded batch",
        restore="none: it would depend on padding",
    ),
    _row(
        "token_logp", "temperature", "actor_rollout_ref.rollout.temperature",
        lambda config: config.actor_rollout_ref.rollout.temperature,
    ),
    _row(
        "kl_in_reward",
        "beta",
        f"{_ALGORITHM}kl_ctrl.kl_coef",
        lambda config: config.algorithm.kl_ctrl.kl_coef,
        conversion="the start; `adaptive` moves it",
    ),
    _row(
        "kl_in_reward",
        "kind",
        f"{_ALGORITHM}kl_penalty",
        lambda config: KL_KINDS[config.algorithm.kl_penalty],
        conversion="kl → k1, mse → k2, low_var_kl → k3",
        verl="low_var_kl and k3 are cut at 10",
        restore="none in the reward",
    ),
    _row(
        "adaptive_kl_update", "target", f"{_ALGORITHM}kl_ctrl.target_kl",
        lambda config: config.algorithm.kl_ctrl.target_kl,
    ),
    _row(
        "adaptive_kl_update", "horizon", f"{_ALGORITHM}kl_ctrl.horizon",
        lambda config: config.algorithm.kl_ctrl.horizon,
    ),
    _row(
        "kl_estimate",
        "kind",
        f"{_ACTOR}kl_loss_type",
        lambda config: KL_KINDS[config.actor_rollout_ref.actor.kl_loss_type],
        conversion="kl → k1, mse → k2, low_var_kl → k3",
    ),
    _row(
        "kl_estimate",
        "value_clamp",
        f"{_ACTOR}kl_loss_value_clamp",
        _value_clamp,
        conversion="of low_var_kl and k3: 10 as in verl; null: none",
    ),
    *_distillation("distillation_loss"),
    _row(
        "distillation_loss",
        "agg",
        f"{_ACTOR}loss_agg_mode",
        lambda config: config.actor_rollout_ref.actor.loss_agg_mode,
    ),
    *_distillation("distillation_pg_loss"),
    _row(
        "distillation_pg_loss", "clip_low", f"{_DISTILLATION}clip_ratio_low",
        lambda config: config.distillation.distillation_loss.clip_ratio_low,
        conversion="not set: clip_ratio",
        verl="clip_ratio alone has no effect",
        restore="set clip_ratio_low and clip_ratio_high",
    ),
    _row(
        "distillation_pg_loss", "clip_high", f"{_DISTILLATION}clip_ratio_high",
        lambda config: config.distillation.distillation_loss.clip_ratio_high,
        conversion="not set: clip_ratio",
        verl="clip_ratio alone has no effect",
        restore="set clip_ratio_low and clip_ratio_high",
    ),
    _row("distillation_pg_loss", "dual_clip", None, lambda _: 3.0, conversion="always, as verl"),
    _row(
        "distillation_pg_loss",
        "agg",
        f"{_ACTOR}loss_agg_mode",
        lambda config: config.actor_rollout_ref.actor.loss_agg_mode,
    ),
    _row(
        "value_loss", "clip", "critic.cliprange_value",
        lambda config: config.critic.cliprange_value,
    ),
    _row(
        "value_loss",
        "agg",
        "critic.loss_agg_mode",
        lambda config: config.critic.loss_agg_mode or config.actor_rollout_ref.actor.loss_agg_mode,
        conversion="null: the actor's",
    ),
    _row(
        "rollout_is_weights",
        "level, mode, upper, lower",
        f"{_CORRECTION}rollout_is_threshold",
        importance_weights,
        conversion="a number: truncate at it; `lo_hi`: mask outside; level by rollout_is",
    ),
    _row(
        "rollout_is_weights",
        "batch_normalize",
        f"{_CORRECTION}rollout_is_batch_normalize",
        lambda config: config.algorithm.rollout_correction.rollout_is_batch_normalize,
    ),
    _row(
        "rejection_mask",
        "stat, level, lower, upper",
        f"{_CORRECTION}rollout_rs_threshold",
        rejections,
        conversion="one call per option of rollout_rs: `seq_mean_k3` is level seq_mean, stat k3",
        verl="`lo_hi` of k1 options bounds the inverse of the ratio",
        restore='rollout_rs_threshold="<1/hi>_<1/lo>"',
    ),
    _row(
        "off_policy_sequence_mask",
        "delta",
        f"{_ACTOR}policy_loss.off_policy_delta",
        lambda config: config.actor_rollout_ref.actor.policy_loss.off_policy_delta,
        conversion="null: not applied",
    ),
    _row(
        "overlong_penalty", "max_len", "reward.reward_kwargs.max_resp_len",
        lambda c: c.reward.reward_kwargs.max_resp_len or c.data.max_response_length,
        conversion="null: data.max_response_length",
        verl="the penalty goes on growing beyond it; tokens of tools count",
        restore="none: set max_resp_len to max_response_length; then no response is longer",
    ),
    _row(
        "overlong_penalty", "cache_len", "reward.reward_kwargs.overlong_buffer_cfg.len",
        lambda config: config.reward.reward_kwargs.overlong_buffer_cfg.len,
    ),
    _row(
        "overlong_penalty", "factor", "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor",
        lambda config: config.reward.reward_kwargs.overlong_buffer_cfg.penalty_factor,
    ),
)  # fmt: skip

ARGUMENTS: tuple[Argument, ...] = _ESTIMATOR_ROWS + _LOSS_ROWS + _OTHER_ROWS
