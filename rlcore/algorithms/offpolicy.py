"""How far the rollout engine's log-probs are from the trainer's.

Legend: B rows (trajectories), T response positions, d = train_logp - rollout_logp.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.masked import is_nonempty, masked_mean, row_mean, select
from rlcore.algorithms.ratio import LOG_RATIO_LIMIT


@torch.no_grad()
def offpolicy_metrics(
    train_logp: Float[Tensor, "B T"],
    rollout_logp: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
) -> dict[str, float]:
    """Return the gap between engine and trainer: 0 (perplexities equal) where they agree.

    Keys: kl = mean(-d) of KL(rollout || train), k3_kl, chi2_token = mean(exp(2 d)) - 1, chi2_seq
    with d summed over a row, training_ppl and rollout_ppl = mean over non-empty rows of
    exp(-mean logp), probs_diff_{mean,max,std} of the token probabilities, logp_diff_{mean,max} of
    |d|.

    Args:
        train_logp: recomputed by the trainer before the update, never the current policy.
        rollout_logp: reported by the engine at sampling.
        mask: valid tokens.
    """
    train, rollout = select(train_logp, mask).double(), select(rollout_logp, mask).double()
    d = train - rollout
    bounded = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    is_row = is_nonempty(mask)
    chi2_seq = (2 * d.sum(-1).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).expm1()
    difference = (train.exp() - rollout.exp()).abs()
    mean_difference = masked_mean(difference, mask)
    values = {
        "kl": masked_mean(-d, mask),
        "k3_kl": masked_mean(bounded.expm1() - bounded, mask),
        "chi2_token": masked_mean((2 * bounded).expm1(), mask),
        "chi2_seq": masked_mean(chi2_seq, is_row),
        "training_ppl": masked_mean((-row_mean(train, mask)).exp(), is_row),
        "rollout_ppl": masked_mean((-row_mean(rollout, mask)).exp(), is_row),
        "probs_diff_mean": mean_difference,
        "probs_diff_max": select(difference, mask).amax() if difference.numel() else d.sum(),
        "probs_diff_std": masked_mean((difference - mean_difference).square(), mask).sqrt(),
        "logp_diff_mean": masked_mean(d.abs(), mask),
        "logp_diff_max": d.abs().amax() if d.numel() else d.sum(),
    }
    return {name: value.item() for name, value in values.items()}
