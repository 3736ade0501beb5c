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
verl: the rows counted in S are those with a valid token, as in the numerator.
"""

from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from rlcore.algorithms.masked import select

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
    if mode not in get_args(AggMode):
        raise ValueError(f"unknown loss_agg_mode {mode!r}; known: {', '.join(get_args(AggMode))}")
    values = select(x, mask)
    if mode == "token-sum":
        return dp_size * values.sum()
    num_valid = mask.bool().sum(-1)
    if mode == "token-mean":
        total = int(num_valid.sum()) if batch_num_tokens is None else batch_num_tokens
        return dp_size * values.sum() / max(total, 1)
    row_values = values.sum(-1)
    if mode == "seq-mean-token-mean":
        row_values = row_values / num_valid.clamp(min=1)
    num_rows = int((num_valid > 0).sum()) if global_batch_size is None else global_batch_size
    loss = dp_size * row_values.sum() / max(num_rows, 1)
    if mode == "seq-mean-token-sum-norm":
        loss = loss / max(loss_scale_factor or mask.shape[-1], 1e-12)
    return loss


def batch_totals(mask: Shaped[Tensor, "B T"]) -> dict[str, Any]:
    """Return the totals of an optimizer step as keyword arguments of `agg_loss`."""
    num_valid = torch.as_tensor(mask).bool().sum(-1)
    return {
        "batch_num_tokens": int(num_valid.sum()),
        "global_batch_size": int((num_valid > 0).sum()),
    }
