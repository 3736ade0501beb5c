"""How far the rollout engine's log-probs are from the trainer's.

Legend: B rows (trajectories), T response positions, d = train_logp - rollout_logp.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.masked import masked_mean, select


@torch.no_grad()
def offpolicy_metrics(
    train_logp: Float[Tensor, "B T"],
    rollout_logp: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
) -> dict[str, float]:
    """Return the gap between engine and trainer: 0 (perplexities equal) where they agree.

    Keys: kl = mean(-d) of KL(rollout || train), k3_kl, chi2_token = mean(exp(2 d)) - 1, chi2_seq
    with d summed over a row, training_ppl and rollout_ppl = mean over non-empty rows of
    exp(-mean logp), probs_diff_{mean,max,std} of the token probabilities.

    Args:
        train_logp: recomputed by the trainer before the update, never the current policy.
        rollout_logp: reported by the engine at sampling.
        mask: valid tokens.
    """
    train, rollout = select(train_logp, mask).double(), select(rollout_logp, mask).double()
    d = train - rollout
    num_valid = mask.bool().sum(-1)
    is_row = num_valid > 0
    chi2_seq = (2 * d.sum(-1).clamp(-20, 20)).exp() - 1
    difference = (train.exp() - rollout.exp()).abs()
    mean_difference = masked_mean(difference, mask)
    values = {
        "kl": masked_mean(-d, mask),
        "k3_kl": masked_mean(d.clamp(-20, 20).exp() - 1 - d, mask),
        "chi2_token": masked_mean((2 * d.clamp(-20, 20)).exp() - 1, mask),
        "chi2_seq": masked_mean(chi2_seq, is_row),
        "training_ppl": masked_mean(_perplexity(train, num_valid), is_row),
        "rollout_ppl": masked_mean(_perplexity(rollout, num_valid), is_row),
        "probs_diff_mean": mean_difference,
        "probs_diff_max": select(difference, mask).amax() if difference.numel() else d.sum(),
        "probs_diff_std": masked_mean((difference - mean_difference).square(), mask).sqrt(),
    }
    return {name: value.item() for name, value in values.items()}


def _perplexity(logp: Tensor, num_valid: Tensor) -> Tensor:
    return torch.exp(-logp.sum(-1) / num_valid.clamp(min=1))
