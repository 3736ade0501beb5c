"""Advantages from the scores of a group, and the registry of estimators under verl's names.

Legend: B rows (trajectories), T response positions, g the group of a row.

GRPO (DeepSeekMath, https://arxiv.org/abs/2402.03300): A = (r - mean_g) / (std_g + eps), the epsilon
outside the root, the standard deviation with Bessel's correction (as torch.std, verl, TRL).
Dr.GRPO (https://arxiv.org/abs/2503.20783): A = r - mean_g, without the division.

Differences from verl: a group of one trajectory has advantage 0 (verl: the raw score), since it
has no baseline; a group whose scores are all equal has exactly 0, found by comparison and not
left to cancellation. A score of NaN means unscorable: it is in no statistic and has advantage 0.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.masked import select
from rlcore.registry import Registry

Singleton = Literal["zero", "raw"]


AdvantageEstimator = Callable[..., Float[Tensor, "B T"]]
"""`(scores [B], groups, mask [B, T], *, norm_by_std) -> advantages [B, T]`, 0 where mask is 0."""

ADV_ESTIMATORS: Registry[AdvantageEstimator] = Registry("advantage estimator")


@ADV_ESTIMATORS.register("grpo")
def grpo(
    scores: Float[Tensor, " B"],
    groups: Sequence[Hashable],
    mask: Shaped[Tensor, "B T"],
    norm_by_std: bool = True,
    eps: float = 1e-6,
    unbiased: bool = True,
    singleton: Singleton = "zero",
    std_level: Literal["group", "batch"] = "group",
) -> Float[Tensor, "B T"]:
    """Return the group-relative advantage (r - mean_g) / (std_g + eps) at every valid token.

    Args:
        scores: one per trajectory; NaN = unscorable.
        groups: label per row, compared as objects.
        mask: valid tokens.
        norm_by_std: False leaves out the division (Dr.GRPO).
        eps: added to the standard deviation.
        unbiased: Bessel's correction; False = population.
        singleton: advantage of a group of one: "zero", or "raw" (its score, as in verl).
        std_level: deviation of the group, or of all scores of the batch.

    Raises:
        ValueError: the labels are not one per row.
    """
    if len(groups) != len(scores):
        raise ValueError(f"{len(groups)} group labels for {len(scores)} scores")
    wide = scores.double()
    is_scored = ~wide.isnan()
    advantages = torch.zeros_like(wide)
    batch_std = _std(wide[is_scored], unbiased)
    for rows in _rows_by_label(groups):
        members = rows[is_scored[rows]]
        values = wide[members]
        if len(values) == 1 and singleton == "raw":
            advantages[members] = values / (1 + eps) if norm_by_std else values
        elif len(values) > 1 and values.max() != values.min():
            std = batch_std if std_level == "batch" else _std(values, unbiased)
            centred = values - values.mean()
            advantages[members] = centred / (std + eps) if norm_by_std else centred
    dtype = scores.dtype if scores.dtype == torch.float64 else torch.float32
    return select(advantages.to(dtype)[:, None].expand(mask.shape), mask)


def dr_grpo(
    scores: Float[Tensor, " B"],
    groups: Sequence[Hashable],
    mask: Shaped[Tensor, "B T"],
    singleton: Singleton = "zero",
) -> Float[Tensor, "B T"]:
    """Return r - mean_g at every valid token; pair it with a constant-divisor aggregation."""
    return grpo(scores, groups, mask, norm_by_std=False, singleton=singleton)


def _rows_by_label(groups: Sequence[Hashable]) -> list[Tensor]:
    rows: dict[Hashable, list[int]] = {}
    for row, label in enumerate(groups):
        rows.setdefault(label, []).append(row)
    return [torch.tensor(members) for members in rows.values()]


def _std(values: Tensor, unbiased: bool) -> Tensor:
    # Two passes: E[x^2] - E[x]^2 can be negative.
    divisor = max(len(values) - int(unbiased), 1)
    return ((values - values.mean()).square().sum() / divisor).sqrt()
