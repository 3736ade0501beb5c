"""Section `algorithm`: from rewards to advantages, and the correction of what others sampled."""

from typing import Annotated, Literal

from pydantic import Field

from rlcore.config.actor import KLKind
from rlcore.config.base import (
    Batches,
    Count,
    Factor,
    LogProb,
    Section,
    Share,
    Trajectories,
    Words,
)
from rlcore.config.pending import KL, KL_WEIGHT

Threshold = Factor | str | None


class KLControlConfig(Section):
    """The weight of the KL penalty in the reward."""

    type: Annotated[Literal["fixed", "adaptive"], KL] = "fixed"
    """`adaptive` moves the weight towards `target_kl`."""
    kl_coef: Annotated[Factor, KL_WEIGHT] = Field(default=0.001, ge=0)
    """Weight at the start."""
    horizon: Annotated[Trajectories, KL] = Field(default=10000, ge=1)
    """Trajectories over which `adaptive` reacts."""
    target_kl: Annotated[LogProb, KL] = Field(default=0.1, gt=0)
    """Mean KL per token that `adaptive` aims at."""


class FilterGroupsConfig(Section):
    """DAPO's dynamic sampling: groups whose metric is the same in all sessions are replaced."""

    enable: bool = False
    """Replace such groups."""
    metric: str = Field(default="reward", min_length=1)
    """`reward`, or a key that the reward function returns (`acc`)."""
    max_inflight_gen_batches: Batches = Field(default=1, gt=0)
    """Batches that are generated at the same time at most."""
    max_num_gen_batches: Count = Field(default=0, ge=0)
    """Batches that are generated for one step at most; 0: no limit (verl: none)."""


class RolloutCorrectionConfig(Section):
    """Correction for the difference between the weights that sampled and those that train."""

    rollout_is: Literal["token", "sequence", "geometric"] | None = None
    """Importance weights per token, sequence, or its geometric mean (ours); null: none."""
    rollout_is_threshold: Factor | str = 2.0
    """A number: weights are cut to it (TIS); `"lo_hi"`: weights outside are 0 (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean."""
    rollout_rs: str | None = None
    """Rejection: a comma list of token_k1, seq_sum_k1, seq_mean_k3, seq_max_k2, …; null: none."""
    rollout_rs_threshold: Threshold = None
    """Bounds per option: a number (upper; for k1 a ratio, lower = 1/upper), or `"lo_hi"`."""
    bypass_mode: bool = False
    """Take the engine's log-probs for the old ones: two policies, one forward pass less."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """Loss of `bypass_mode`."""


class AlgorithmConfig(Section):
    """From rewards to advantages."""

    adv_estimator: str = "grpo"
    """Advantage estimator (verl: gae, which needs a critic)."""
    gamma: Share = Field(default=1.0, ge=0, le=1)
    """Discount per valid token."""
    lam: Share = Field(default=1.0, ge=0, le=1)
    """Lambda of GAE."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation; false: Dr. GRPO."""
    singleton: Literal["zero", "raw"] = "zero"
    """Advantage of a group of one: 0, or its score as in verl (ours)."""
    gpg_alpha_mode: Literal["valid_groups", "nonzero_scores", "none"] = "valid_groups"
    """GPG's factor: by groups that differ, by non-zero scores as in verl, or 1 (ours)."""
    gdpo_batch_norm: Literal["sample", "token", "none"] = "sample"
    """GDPO's last step: one vote a trajectory, one a token as in verl, or none (ours)."""
    gdpo_reward_keys: Words | None = None
    """Keys of the reward function's result that GDPO combines."""
    gdpo_reward_weights: tuple[Factor, ...] | None = None
    """Their weights; null: 1 each."""
    use_kl_in_reward: Annotated[bool, KL] = False
    """Subtract a KL penalty from the reward."""
    kl_penalty: Annotated[KLKind, KL] = "kl"
    """Estimator of that KL."""
    kl_ctrl: KLControlConfig = Field(default_factory=KLControlConfig)
    """The weight of that penalty."""
    filter_groups: FilterGroupsConfig = Field(default_factory=FilterGroupsConfig)
    """DAPO's dynamic sampling."""
    rollout_correction: RolloutCorrectionConfig = Field(default_factory=RolloutCorrectionConfig)
    """Correction of what other weights sampled."""
