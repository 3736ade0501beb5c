"""From token losses to one number whose micro-batch parts add up exactly.

Legend: B rows (trajectories), T response positions, n_b valid tokens of row b, N their sum.

| mode | value |
|---|---|
| token-mean (DAPO) | dp * sum x / N |
| token-sum | dp * sum x |
| seq-mean-token-mean (GRPO, GSPO) | dp / S * sum over rows (row sum / n_b) |
| seq-mean-token-sum | dp / S * sum over rows (row sum) |
| seq-mean-token-sum-norm (Dr.GRPO) | the former / (loss_scale_factor or T) |

N and S are totals of the whole optimizer step, given by the caller; then the losses of its
micro-batches sum to the loss of the undivided batch, without further division. Difference from
verl: the rows counted in S are those with a valid token, as in the numerator. A divisor of 0
gives 0.
"""

from typing import Literal, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.choices import check_choice
from rlcore.algorithms.masked import is_nonempty, masked_sum, row_mean, select

AggMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
]


def agg_loss(
    x: Float[Tensor, "B T"],
    mask: Shaped[Tensor, "B T"],
    mode: AggMode = "token-mean",
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
) -> Float[Tensor, ""]:
    """Return the aggregated loss; 0 with gradient 0 where nothing is valid.

    Args:
        x: loss per token.
        mask: valid tokens.
        mode: see the table above.
        dp_size: undoes the gradient mean of data parallelism.
        batch_num_tokens: valid tokens of the optimizer step; None = those of `mask`.
        global_batch_size: rows with a valid token of the optimizer step; None = those of `mask`.
        loss_scale_factor: divisor of seq-mean-token-sum-norm, e.g. the longest response; None = T,
            which depends on padding.

    Raises:
        ValueError: unknown mode.
    """
    check_choice("loss_agg_mode", mode, get_args(AggMode))
    if mode == "token-sum":
        return dp_size * masked_sum(x, mask)
    if mode == "token-mean":
        total = _total(mask.bool()) if batch_num_tokens is None else batch_num_tokens
        return _quotient(dp_size * masked_sum(x, mask), total)
    rows = row_mean(x, mask) if mode == "seq-mean-token-mean" else select(x, mask).sum(-1)
    num_rows = _total(is_nonempty(mask)) if global_batch_size is None else global_batch_size
    loss = _quotient(dp_size * rows.sum(), num_rows)
    if mode == "seq-mean-token-sum-norm":
        loss = _quotient(loss, loss_scale_factor or mask.shape[-1])
    return loss


def batch_totals(mask: Shaped[Tensor, "B T"]) -> dict[str, int]:
    """Return the totals of an optimizer step as keyword arguments of `agg_loss`."""
    return {"batch_num_tokens": _total(mask.bool()), "global_batch_size": _total(is_nonempty(mask))}


def _total(flags: Tensor) -> int:
    return int(flags.sum())


def _quotient(x: Tensor, divisor: float) -> Tensor:
    """Return x / divisor; 0 with gradient 0 if the divisor is 0."""
    return x / divisor if divisor else select(x, torch.zeros_like(x))
