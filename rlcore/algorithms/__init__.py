"""Pure functions of tensors and numbers: the maths of post-training by reinforcement learning.

| family | functions |
|---|---|
| statistics | masked_sum, masked_mean, masked_var, masked_whiten |
| rewards | place_outcome_reward, overlong_penalty, kl_in_reward, adaptive_kl_update |
| advantages per token | gae, remax, reinforce_pp |
| advantages per row | grpo, dr_grpo, rloo, grpo_passk, opo, gpg, gdpo, reinforce_pp_baseline |
| several rows per session | multi_trajectory, session_weights |
| prompts worth training on | dynamic_sampling_keep |
| policy losses | ppo_loss, decoupled_ppo_loss, gspo_loss, gmpo_loss, cispo_loss, sapo_loss |
| policy gradient | reinforce_loss |
| on-policy distillation | distillation_loss, distillation_pg_loss, teacher_kl |
| other losses | kl_estimate, kl_importance_weighted, value_loss; agg_loss aggregates each |
| rollout correction | rollout_is_weights, rejection_mask, off_policy_sequence_mask |
| off-policy gap | offpolicy_metrics |
| logits | token_logp, token_entropy |

`ADV_ESTIMATORS` and `POLICY_LOSSES` hold them under verl's names; estimators.py and losses.py say
how entries are called and how to add one.
"""

from rlcore.algorithms.advantages import dr_grpo, gpg, grpo, grpo_passk, opo, rloo
from rlcore.algorithms.aggregate import agg_loss, batch_totals
from rlcore.algorithms.batch_advantages import gdpo, reinforce_pp_baseline
from rlcore.algorithms.bypass import drop_drifted, drop_rejected
from rlcore.algorithms.correction import Correction, correct_rollout
from rlcore.algorithms.distillation import (
    distillation_advantages,
    distillation_loss,
    distillation_pg_loss,
    teacher_kl,
)
from rlcore.algorithms.estimators import (
    ADV_ESTIMATORS,
    AdvantageInputs,
    Estimator,
    register_adv_est,
)
from rlcore.algorithms.kl import kl_estimate, kl_importance_weighted
from rlcore.algorithms.logits import token_entropy, token_logp
from rlcore.algorithms.losses import (
    POLICY_LOSSES,
    PolicyLoss,
    PolicyLossInputs,
    register_policy_loss,
)
from rlcore.algorithms.masked import masked_mean, masked_sum, masked_var, masked_whiten
from rlcore.algorithms.offpolicy import offpolicy_metrics
from rlcore.algorithms.ppo import decoupled_ppo_loss, ppo_loss
from rlcore.algorithms.returns import gae, reinforce_pp, remax
from rlcore.algorithms.rewards import (
    adaptive_kl_update,
    kl_in_reward,
    overlong_penalty,
    place_outcome_reward,
)
from rlcore.algorithms.rollout_correction import (
    off_policy_sequence_mask,
    rejection_mask,
    rollout_is_weights,
)
from rlcore.algorithms.sequence_losses import gmpo_loss, gspo_loss
from rlcore.algorithms.sessions import dynamic_sampling_keep, multi_trajectory, session_weights
from rlcore.algorithms.value import value_loss
from rlcore.algorithms.weighted_losses import cispo_loss, reinforce_loss, sapo_loss

__all__ = [
    "ADV_ESTIMATORS",
    "POLICY_LOSSES",
    "AdvantageInputs",
    "Correction",
    "Estimator",
    "PolicyLoss",
    "PolicyLossInputs",
    "adaptive_kl_update",
    "agg_loss",
    "batch_totals",
    "cispo_loss",
    "correct_rollout",
    "decoupled_ppo_loss",
    "distillation_advantages",
    "distillation_loss",
    "distillation_pg_loss",
    "dr_grpo",
    "drop_drifted",
    "drop_rejected",
    "dynamic_sampling_keep",
    "gae",
    "gdpo",
    "gmpo_loss",
    "gpg",
    "grpo",
    "grpo_passk",
    "gspo_loss",
    "kl_estimate",
    "kl_importance_weighted",
    "kl_in_reward",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "multi_trajectory",
    "off_policy_sequence_mask",
    "offpolicy_metrics",
    "opo",
    "overlong_penalty",
    "place_outcome_reward",
    "ppo_loss",
    "register_adv_est",
    "register_policy_loss",
    "reinforce_loss",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "rejection_mask",
    "remax",
    "rloo",
    "rollout_is_weights",
    "sapo_loss",
    "session_weights",
    "teacher_kl",
    "token_entropy",
    "token_logp",
    "value_loss",
]
