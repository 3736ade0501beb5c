"""The critic's loss.

Legend: B rows (trajectories), T response positions, v value, R return. Clipping as in PPO's
original code, https://arxiv.org/abs/1707.06347: the new value may move by `clip` from the old one.
"""

from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.aggregate import AggMode, agg_loss
from rlcore.algorithms.masked import constant, select


def value_loss(
    vpred: Float[Tensor, "B T"],
    returns: Float[Tensor, "B T"],
    old_values: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    clip: float | None = 0.5,
    agg: AggMode = "token-mean",
    agg_kw: dict[str, Any] | None = None,
) -> Float[Tensor, ""]:
    """Return 0.5 agg(max((v - R)^2, (clamp(v, old - clip, old + clip) - R)^2)).

    Where the clipped term wins the gradient is 0.

    Args:
        vpred: values under the weights being trained.
        returns: what they should be.
        old_values: values at the start of the step.
        mask: valid tokens.
        clip: how far a value may move; None = any.
        agg: mode of `agg_loss`.
        agg_kw: its further arguments.

    Raises:
        ValueError: `agg` is unknown.
    """
    value, target = select(vpred, mask), constant(returns, mask)
    errors = (value - target).square()
    if clip is not None:
        old = constant(old_values, mask)
        bounded = torch.clamp(value, old - clip, old + clip)
        errors = torch.maximum(errors, (bounded - target).square())
    return 0.5 * agg_loss(errors, mask, agg, **(agg_kw or {}))
