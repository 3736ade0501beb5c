"""Probability ratios and the clipped surrogate: the pieces that the policy losses share.

Legend: B rows (trajectories), T response positions. Gradient flows to `logp` only.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.masked import constant, select

LOG_RATIO_LIMIT = 20.0
"""Log ratios are bounded by this before exp: beyond it the value is finite and the gradient 0."""


def log_ratio(
    old_logp: Float[Tensor, "B T"], logp: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Return logp - old_logp, bounded, 0 where the mask is 0."""
    difference = select(logp, mask) - constant(old_logp, mask)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def probability_ratio(
    old_logp: Float[Tensor, "B T"], logp: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Return r = exp(logp - old_logp), bounded; 1 where the mask is 0."""
    return log_ratio(old_logp, logp, mask).exp()


def clipped_surrogate(
    ratio: Float[Tensor, "B T"],
    advantage: Float[Tensor, "B T"],
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Float[Tensor, "B T"]:
    """Return -min(r A, clip(r, 1 - low, 1 + high) A) per token, capped at -c A where A < 0.

    Raises:
        ValueError: `dual_clip` is not above 1.
    """
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip must be above 1, is {dual_clip}")
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(-ratio * advantage, -clipped * advantage)
    if dual_clip is None:
        return losses
    capped = torch.minimum(losses, -dual_clip * advantage)
    return torch.where(advantage < 0, capped, losses)


def weighted(
    losses: Float[Tensor, "B T"],
    is_weights: Float[Tensor, "B T"] | None,
    mask: Shaped[Tensor, "B T"],
) -> Float[Tensor, "B T"]:
    """Return the losses times the constant importance weights, if there are any."""
    return losses if is_weights is None else losses * constant(is_weights, mask)
