"""Columns that a forward pass without gradient computes: log-probs, entropy, values."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlcore.training.batches import MicroBatchLimits, Rows, in_lockstep, micro_batches
from rlcore.training.layout import Layout
from rlcore.training.ranks import Ranks
from rlcore.training.row_model import RowModel


@torch.no_grad()
def computed_columns(
    model: RowModel,
    rows: Rows,
    limits: MicroBatchLimits,
    ranks: Ranks,
    forward: Callable[[Layout], Sequence[Tensor]],
) -> list[list[Tensor]]:
    """Return, for each tensor that `forward` gives per response token, one float32 row per row.

    Args:
        model: Whose layouts and idle passes are used.
        rows: This rank's; they may be none.
        limits: Of a micro-batch.
        ranks: All of them call this together.
        forward: One pass.
    """
    count = len(rows["responses"])
    micros = list(micro_batches(rows, range(count), model.packing, limits))
    most = max(ranks.gather(len(micros)))
    columns: list[list[Tensor]] = []
    for micro, _ in in_lockstep(micros, most):
        if not micro:
            model.idle_pass(backward=False)
            continue
        responses = [rows["responses"][i] for i in micro]
        found = forward(model.layout([rows["prompts"][i] for i in micro], responses))
        lengths = [len(response) for response in responses]
        columns = columns or [[torch.empty(0)] * count for _ in found]
        for column, values in zip(columns, found, strict=True):
            for i, value in zip(micro, values.float().cpu().split(lengths), strict=True):
                column[i] = value.clone()
    return columns
