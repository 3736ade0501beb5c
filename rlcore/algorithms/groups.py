"""Groups of rows and sessions of rows, by labels of any kind.

Labels are compared as objects: "1" and "01" differ, rows of a group need not be adjacent, groups
may have different sizes. A score of NaN means unscorable: its row is in no statistic.
"""

from collections.abc import Callable, Hashable, Sequence

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from rlcore.algorithms.masked import spread, widen

Labels = Sequence[Hashable] | Shaped[Tensor, " B"]
"""One label per row."""

Members = Int[Tensor, " g"]
"""Indices of the rows of a group."""


def labels_of(what: str, labels: Labels, count: int) -> list[Hashable]:
    """Return the labels as a list of plain objects.

    Raises:
        ValueError: they are not one per row.
    """
    # The elements of a tensor are tensors, equal to none other.
    plain: list[Hashable] = (
        [label.item() for label in labels] if isinstance(labels, Tensor) else list(labels)
    )
    if len(plain) != count:
        raise ValueError(f"{len(plain)} {what} for {count} rows")
    return plain


def rows_by_label(labels: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """Return the rows of every label, labels in the order of their first row."""
    rows: dict[Hashable, list[int]] = {}
    for row, label in enumerate(labels):
        rows.setdefault(label, []).append(row)
    return rows


def as_scores(scores: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return the scores in float64.

    Raises:
        ValueError: one is infinite; NaN is allowed.
    """
    if scores.isinf().any():
        raise ValueError(f"scores must be finite or NaN (unscorable), are {scores}")
    return scores.detach().double()


def per_group(
    values: Float[Tensor, " B"],
    groups: Sequence[Hashable],
    advantage: Callable[[Float[Tensor, " g"], Members], Float[Tensor, " g"]],
    alone: Callable[[Float[Tensor, " one"]], Float[Tensor, " one"]] | None = None,
) -> Float[Tensor, " B"]:
    """Return `advantage` of every group's scored rows, 0 for unscorable ones.

    Args:
        values: float64 scores.
        groups: label per row.
        advantage: of the scores of two or more rows that are not all equal, and their indices.
            Equal ones have exactly 0, found by comparison: cancellation leaves a residue.
        alone: of a group's only scored row; None: 0, as it has no baseline.
    """
    found = torch.zeros_like(values)
    for rows in rows_by_label(groups).values():
        index = torch.tensor(rows, device=values.device)
        index = index[~values[index].isnan()]
        members = values[index]
        if len(members) == 1 and alone is not None:
            found[index] = alone(members)
        elif len(members) > 1 and members.max() != members.min():
            found[index] = advantage(members, index)
    return found


def std(values: Float[Tensor, " n"], unbiased: bool = True) -> Float[Tensor, ""]:
    """Return the standard deviation in two passes; 0 of fewer values than it needs."""
    # E[x^2] - E[x]^2 in one pass can be negative.
    divisor = max(len(values) - int(unbiased), 1)
    return ((values - values.mean()).square().sum() / divisor).sqrt()


def to_tokens(
    advantages: Float[Tensor, " B"], scores: Shaped[Tensor, "B ..."], mask: Shaped[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Return float64 row advantages at the valid tokens, in the scores' type or float32."""
    return spread(advantages.to(widen(scores).dtype), mask)
