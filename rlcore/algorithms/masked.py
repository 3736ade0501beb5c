"""Sums, means and variances over the valid positions of a tensor, and what every family shares.

Legend: B rows (trajectories), T response positions, n_b valid tokens of row b. A value where the
mask is 0 is never read (it may be NaN): values are selected before they are used, so that their
gradient is 0 too. Nothing valid gives 0 with gradient 0. At least float32 throughout; float64
stays.

The statistics are those of the tensors given: a caller that shards its batch gives the union.
"""

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


def widen(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return `x` in at least float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def select(x: Float[Tensor, "*n"], mask: Shaped[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return `x` in at least float32 where `mask` is set, else 0 with gradient 0."""
    wide = widen(x)
    return torch.where(mask.bool(), wide, torch.zeros((), dtype=wide.dtype, device=x.device))


def constant(x: Float[Tensor, "*n"], mask: Shaped[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return `select(x, mask)` without gradient."""
    return select(x.detach(), mask)


def checked(name: str, x: Float[Tensor, "*n"], mask: Shaped[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """Return `constant(x, mask)` after checking that the valid values are finite.

    Raises:
        ValueError: one is not; the message gives the position of the first.
    """
    values = constant(x, mask)
    if not torch.isfinite(values).all():
        first = tuple(int(i) for i in (~torch.isfinite(values)).nonzero()[0])
        raise ValueError(f"{name} is {values[first].item()} at valid position {first}")
    return values


def num_valid(mask: Shaped[Tensor, "B T"]) -> Int[Tensor, " B"]:
    """Return n_b, the number of valid tokens of every row."""
    return mask.bool().sum(-1)


def is_nonempty(mask: Shaped[Tensor, "B T"]) -> Bool[Tensor, " B"]:
    """Return which rows have a valid token."""
    return mask.bool().any(-1)


def row_mean(x: Float[Tensor, "B T"], mask: Shaped[Tensor, "B T"]) -> Float[Tensor, " B"]:
    """Return the mean of every row's valid values; 0 for a row without any."""
    return select(x, mask).sum(-1) / num_valid(mask).clamp(min=1)


def spread(values: Float[Tensor, " B"], mask: Shaped[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Return every row's value at its valid tokens, 0 elsewhere."""
    return select(values[:, None].expand(mask.shape), mask)


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
    return select(squares / divisor.clamp(min=1), divisor > 0)


def masked_whiten(
    x: Float[Tensor, "*n"],
    mask: Shaped[Tensor, "*n"],
    shift_mean: bool = True,
    unbiased: bool = True,
    eps: float = 1e-8,
) -> Float[Tensor, "*n"]:
    """Return (x - mean) / sqrt(var + eps) at valid positions, 0 elsewhere.

    The statistics are computed in float64: the rounding error of a float32 mean, divided by
    sqrt(eps), would turn a constant input into noise.

    Args:
        x: values.
        mask: which of them are valid.
        shift_mean: False adds the mean back after scaling.
        unbiased: Bessel's correction of the variance.
        eps: added to the variance, inside the root.
    """
    wide = select(x, mask).double()
    mean = masked_mean(wide, mask)
    scaled = (wide - mean) * torch.rsqrt(masked_var(wide, mask, unbiased) + eps)
    whitened = scaled if shift_mean else scaled + mean
    return select(whitened.to(widen(x).dtype), mask)
