"""Rollout correction of a whole batch: one weight and any number of rejections, and their metrics.

Legend: B rows (trajectories), T response positions.

Weights are those of the original mask; rejections are joined: a token stays if all keep it. The
advantages belong to the original mask too, so this changes nothing but the loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.loss_metrics import share
from rlcore.algorithms.masked import is_nonempty, masked_mean, masked_var, select
from rlcore.algorithms.rollout_correction import rejection_mask, rollout_is_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """What the loss gets."""

    mask: Shaped[Tensor, "B T"]
    """Valid tokens that no rejection dropped."""
    is_weights: Float[Tensor, "B T"] | None
    """Importance weights, if any were asked for."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """verl's names, without their prefix rollout_corr/."""


@torch.no_grad()
def correct_rollout(
    train_logp: Float[Tensor, "B T"],
    rollout_logp: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    weights: Mapping[str, Any] | None = None,
    rejections: Sequence[Mapping[str, Any]] = (),
) -> Correction:
    """Return the weights and the mask of a batch whose sampler was not quite its trainer.

    Args:
        train_logp: log-probs under the weights at the start of the step.
        rollout_logp: log-probs reported by the engine.
        mask: valid tokens.
        weights: arguments of `rollout_is_weights`; None = no weights.
        rejections: arguments of one `rejection_mask` each.

    Raises:
        ValueError: a valid log-prob is not finite, or an argument is not fit.
    """
    metrics: dict[str, float] = {}
    kept = mask
    for arguments in rejections:
        one = rejection_mask(train_logp, rollout_logp, mask, **arguments)
        name = f"rollout_rs_{arguments.get('level', 'token')}_{arguments.get('stat', 'ratio')}"
        metrics |= _rejected(name, one, mask)
        kept = kept * one.bool()
    if rejections:
        metrics |= _rejected("rollout_rs", kept, mask)
    if weights is None:
        return Correction(mask=kept, is_weights=None, metrics=metrics)
    found = rollout_is_weights(train_logp, rollout_logp, mask, **weights)
    level, upper, lower = (weights.get(name) for name in ("level", "upper", "lower"))
    ratios = rollout_is_weights(
        train_logp, rollout_logp, mask, level=level or "token", upper=float("inf")
    )
    metrics |= _weight_metrics(found, mask)
    metrics["rollout_is_ratio_fraction_high"] = share(ratios > (upper or 2.0), mask)
    metrics["rollout_is_ratio_fraction_low"] = share(ratios < (lower or 0.0), mask)
    return Correction(mask=kept, is_weights=select(found, kept), metrics=metrics)


def _rejected(name: str, kept: Tensor, mask: Tensor) -> dict[str, float]:
    has_tokens = is_nonempty(mask)
    is_row_gone = (~is_nonempty(kept)).float()
    return {
        f"{name}_masked_fraction": share(~kept.bool(), mask),
        f"{name}_seq_masked_fraction": masked_mean(is_row_gone, has_tokens).item(),
    }


def _weight_metrics(weights: Tensor, mask: Tensor) -> dict[str, float]:
    valid = weights[mask.bool()]
    mean, square = masked_mean(weights, mask), masked_mean(weights * weights, mask)
    effective = mean * mean / torch.where(square > 0, square, torch.ones_like(square))
    return {
        "rollout_is_mean": mean.item(),
        "rollout_is_std": masked_var(weights, mask).sqrt().item(),
        "rollout_is_min": valid.min().item() if len(valid) else 0.0,
        "rollout_is_max": valid.max().item() if len(valid) else 0.0,
        "rollout_is_eff_sample_size": effective.item(),
    }
