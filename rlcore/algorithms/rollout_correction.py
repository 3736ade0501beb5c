"""Generation engine against training engine: weights and masks for tokens that are off policy.

Legend: B rows (trajectories), T response positions, d = train_logp - rollout_logp, where train_logp
is the policy at the start of the step recomputed by the trainer, never the one being trained.

Weights: truncated importance sampling (TIS) bounds pi_train / pi_rollout, masked (IcePop) sets
it to 0 outside its bounds. Rejection takes tokens or whole rows out of the mask. Neither goes
with a PPO ratio against the rollout policy itself (bypass mode): that would count one gap twice.
`off_policy_sequence_mask` is DeepSeek-V3.2's, https://arxiv.org/abs/2512.02556.

Difference from verl: bounds of the ratio hold for pi_train / pi_rollout (verl 0.9.1: for its
inverse with the k1 options).
"""

from typing import Literal, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.choices import check_choice
from rlcore.algorithms.masked import (
    checked,
    constant,
    is_nonempty,
    masked_mean,
    row_mean,
    select,
)
from rlcore.algorithms.ratio import LOG_RATIO_LIMIT

WeightLevel = Literal["token", "sequence", "geometric"]
WeightMode = Literal["truncate", "mask"]
RejectionStat = Literal["ratio", "k2", "k3"]
RejectionLevel = Literal["token", "seq_sum", "seq_mean", "seq_max"]

SMALLEST_MEAN = 1e-8
"""Weights with a smaller mean are not normalised."""


@torch.no_grad()
def rollout_is_weights(
    train_logp: Float[Tensor, "B T"],
    rollout_logp: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    level: WeightLevel = "token",
    mode: WeightMode = "truncate",
    upper: float = 2.0,
    lower: float | None = None,
    batch_normalize: bool = False,
) -> Float[Tensor, "B T"]:
    """Return the importance weight of every valid token, 0 elsewhere.

    Args:
        train_logp: log-probs under the weights at the start of the step.
        rollout_logp: log-probs reported by the engine.
        mask: valid tokens.
        level: log weight = d of the token, its sum over the row ("sequence": the product of ratios)
            or its mean ("geometric").
        mode: "truncate": min(w, upper), and at least `lower` if given; "mask": w within the bounds,
            else 0.
        upper: largest weight; usual are 2 per token, 2 to 5 per sequence.
        lower: smallest weight; None = 0.
        batch_normalize: divide by the mean over valid tokens, or over non-empty rows at the
            sequence levels; left out where that is 1e-8 or less.

    Raises:
        ValueError: a valid log-prob is not finite, the bounds are out of order, or an unknown name.
    """
    check_choice("level", level, get_args(WeightLevel))
    check_choice("mode", mode, get_args(WeightMode))
    smallest = 0.0 if lower is None else lower
    if not smallest <= upper:
        raise ValueError(f"upper {upper} must not be below lower {smallest}")
    d = _gap(train_logp, rollout_logp, mask)
    if level == "sequence":
        d = d.sum(-1, keepdim=True).expand(mask.shape)
    elif level == "geometric":
        d = row_mean(d, mask)[:, None].expand(mask.shape)
    weights = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if mode == "truncate":
        weights = weights.clamp(smallest, upper)
    else:
        weights = select(weights, (weights >= smallest) & (weights <= upper))
    if batch_normalize:
        mean = _mean_weight(weights, mask, level)
        weights = weights / torch.where(mean > SMALLEST_MEAN, mean, torch.ones_like(mean))
    return select(weights, mask)


@torch.no_grad()
def rejection_mask(
    train_logp: Float[Tensor, "B T"],
    rollout_logp: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    stat: RejectionStat = "ratio",
    level: RejectionLevel = "token",
    lower: float | None = None,
    upper: float | None = None,
) -> Shaped[Tensor, "B T"]:
    """Return the mask without the tokens or rows outside the bounds, which are inclusive.

    Args:
        train_logp: log-probs under the weights at the start of the step.
        rollout_logp: log-probs reported by the engine.
        mask: valid tokens.
        stat: what is bounded: "ratio" = exp(d), "k2" = d^2 / 2, "k3" = exp(d) - 1 - d; d is taken
            as at most 20 in size.
        level: "token": of each token; of a row's tokens, dropping the whole row: "seq_sum" the
            product of ratios or the sum, "seq_mean" the geometric or arithmetic mean, "seq_max"
            every single token.
        lower: smallest ratio that is kept; only for "ratio".
        upper: largest value that is kept.

    Raises:
        ValueError: a valid log-prob is not finite, a lower bound of k2 or k3, or an unknown name.
    """
    check_choice("stat", stat, get_args(RejectionStat))
    check_choice("level", level, get_args(RejectionLevel))
    if lower is not None and stat != "ratio":
        raise ValueError(f"{stat} has no lower bound, is {lower}: it is 0 where nothing differs")
    d = _gap(train_logp, rollout_logp, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    values = _over_level(d if stat == "ratio" else _divergence(d, stat), mask, level)
    if stat == "ratio":
        values = values.exp()
    is_kept = torch.ones_like(values, dtype=torch.bool)
    if lower is not None:
        is_kept &= values >= lower
    if upper is not None:
        is_kept &= values <= upper
    if level == "seq_max":
        is_kept = (is_kept | ~mask.bool()).all(-1, keepdim=True)
    return mask * is_kept.expand(mask.shape)


@torch.no_grad()
def off_policy_sequence_mask(
    old_logp: Float[Tensor, "B T"],
    logp: Float[Tensor, "B T"],
    adv: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    delta: float,
) -> Shaped[Tensor, "B T"]:
    """Return the mask without the tokens of negative advantage of rows that drifted too far.

    Args:
        old_logp: log-probs of the policy that sampled.
        logp: log-probs under the weights being trained.
        adv: advantages.
        mask: valid tokens.
        delta: largest mean of old_logp - logp over a row's valid tokens.

    Raises:
        ValueError: a valid number is not finite.
    """
    drift = row_mean(-_gap(logp, old_logp, mask), mask)
    is_dropped = (checked("advantage", adv, mask) < 0) & (drift > delta)[:, None]
    return mask * ~is_dropped


def _gap(train_logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> Tensor:
    train = checked("training log-prob", train_logp, mask)
    return train - checked("rollout log-prob", rollout_logp, mask)


def _divergence(d: Tensor, stat: str) -> Tensor:
    return d * d / 2 if stat == "k2" else torch.expm1(d) - d


def _over_level(values: Tensor, mask: Tensor, level: str) -> Tensor:
    """Sum or mean over the row as [B, 1], else the values themselves."""
    if level == "seq_sum":
        return constant(values, mask).sum(-1, keepdim=True)
    if level == "seq_mean":
        return row_mean(values, mask)[:, None]
    return values


def _mean_weight(weights: Tensor, mask: Tensor, level: str) -> Tensor:
    if level == "token":
        return masked_mean(weights, mask)
    return masked_mean(row_mean(weights, mask), is_nonempty(mask))
