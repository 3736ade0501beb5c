"""Pure functions of tensors and numbers."""

from rlcore.algorithms.advantages import ADV_ESTIMATORS, dr_grpo, grpo
from rlcore.algorithms.aggregate import agg_loss, batch_totals
from rlcore.algorithms.kl import kl_estimate
from rlcore.algorithms.logits import token_entropy, token_logp
from rlcore.algorithms.masked import masked_mean, masked_sum, masked_var
from rlcore.algorithms.offpolicy import offpolicy_metrics
from rlcore.algorithms.policy_losses import (
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossSettings,
    ppo_loss,
)
from rlcore.algorithms.rewards import place_outcome_reward

__all__ = [
    "ADV_ESTIMATORS",
    "POLICY_LOSSES",
    "PolicyLossInputs",
    "PolicyLossSettings",
    "agg_loss",
    "batch_totals",
    "dr_grpo",
    "grpo",
    "kl_estimate",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "offpolicy_metrics",
    "place_outcome_reward",
    "ppo_loss",
    "token_entropy",
    "token_logp",
]
