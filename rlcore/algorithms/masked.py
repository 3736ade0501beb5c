"""Sums, means and variances over the valid positions of a [B, T] tensor.

Legend: B rows (trajectories), T response positions. A value where the mask is 0 is never read (it
may be NaN): values are selected before they are used, so that their gradient is 0 too.
"""

import torch
from jaxtyping import Float, Shaped
from torch import Tensor


def select(x: Float[Tensor, "*n"], mask: Shaped[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return `x` in at least float32 where `mask` is set, else 0 with gradient 0."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return torch.where(mask.bool(), wide, torch.zeros((), dtype=wide.dtype, device=x.device))


def masked_sum(x: Float[Tensor, "*n"], mask: Shaped[Tensor, "*n"]) -> Float[Tensor, ""]:
    """Return the sum of the valid values; 0 if there are none."""
    return select(x, mask).sum()


def masked_mean(x: Float[Tensor, "*n"], mask: Shaped[Tensor, "*n"]) -> Float[Tensor, ""]:
    """Return the mean of the valid values; 0 if there are none."""
    return masked_sum(x, mask) / mask.bool().sum().clamp(min=1)


def masked_var(
    x: Float[Tensor, "*n"], mask: Shaped[Tensor, "*n"], unbiased: bool = True
) -> Float[Tensor, ""]:
    """Return the variance of the valid values in two passes.

    Args:
        x: values.
        mask: which of them are valid.
        unbiased: divide by N - 1 (Bessel), else by N; a divisor of 0 or less gives 0.
    """
    centred = select(x, mask) - masked_mean(x, mask)
    squares = masked_sum(centred * centred, mask)
    divisor = mask.bool().sum() - int(unbiased)
    return torch.where(divisor > 0, squares / divisor.clamp(min=1), torch.zeros_like(squares))
