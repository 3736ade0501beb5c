"""Cutting a batch: groups into mini-batches, rows of a mini-batch into micro-batches.

Legend: a row is one trajectory; a group is all rows with one label.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.errors import DataError
from rlcore.training.layout import Packing

Rows = dict[str, list[Tensor]]
"""Column name to one 1-D tensor per row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchLimits:
    """How much goes through the model at once."""

    max_rows: int | None
    """None: by tokens."""
    max_tokens: int
    """Used where `max_rows` is None; a single longer row still is a micro-batch."""


def mini_batches(
    groups: Sequence[Hashable], num_groups: int, *, shuffle_seed: int | None = None
) -> list[list[int]]:
    """Return the row indices of each mini-batch: `num_groups` whole groups, the last maybe fewer.

    Args:
        groups: Label of each row.
        num_groups: Groups per mini-batch.
        shuffle_seed: None keeps the groups' order of appearance.
    """
    rows_of: dict[Hashable, list[int]] = {}
    for row, label in enumerate(groups):
        rows_of.setdefault(label, []).append(row)
    members = list(rows_of.values())
    if shuffle_seed is not None:
        generator = torch.Generator().manual_seed(shuffle_seed)
        order = torch.randperm(len(members), generator=generator)
        members = [members[index] for index in order.tolist()]
    return [
        [row for group in members[start : start + num_groups] for row in group]
        for start in range(0, len(members), num_groups)
    ]


def micro_batches(
    rows: Rows, indices: Sequence[int], packing: Packing, limits: MicroBatchLimits
) -> Iterator[list[int]]:
    """Yield the row indices of each micro-batch: neighbours share prompts or are of like length."""
    prompts, responses = rows["prompts"], rows["responses"]
    keys = {i: tuple(prompts[i].tolist()) for i in indices}
    first_of: dict[tuple[int, ...], int] = {}
    for i in indices:
        first_of.setdefault(keys[i], i)
    # Longest prompts first, rows of one prompt side by side: what stands together pads little.
    order = sorted(indices, key=lambda i: (-len(prompts[i]), first_of[keys[i]], i))
    taken: list[int] = []
    cost = _Cost(packing)
    for i in order:
        cost.add(keys[i], len(responses[i]))
        is_too_much = (
            len(taken) + 1 > limits.max_rows
            if limits.max_rows is not None
            else cost.tokens > limits.max_tokens
        )
        if taken and is_too_much:
            yield taken
            taken, cost = [], _Cost(packing)
            cost.add(keys[i], len(responses[i]))
        taken.append(i)
    if taken:
        yield taken


def in_lockstep(micros: Sequence[list[int]], count: int) -> Iterator[tuple[list[int], bool]]:
    """Yield each micro-batch and whether it is the last of `count`; empty ones fill up."""
    for number in range(count):
        yield micros[number] if number < len(micros) else [], number == count - 1


class _Cost:
    """Tokens that go through the model for a growing set of rows (packed: at most)."""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self._prompts: set[tuple[int, ...]] = set()
        self._packed = self._longest = self._count = 0

    def add(self, prompt: tuple[int, ...], response_length: int) -> None:
        self._packed += response_length + (0 if prompt in self._prompts else len(prompt))
        self._prompts.add(prompt)
        self._longest = max(self._longest, len(prompt) + response_length)
        self._count += 1

    @property
    def tokens(self) -> int:
        is_packed = self._packing == "shared_prefix"
        return self._packed if is_packed else self._longest * self._count


def check_rows(rows: Rows, columns: Sequence[str]) -> int:
    """Return the number of rows after checking that every column has as many of fitting length.

    Raises:
        DataError: a column is missing, or its rows are not as many or as long as the responses.
    """
    missing = [name for name in columns if name not in rows]
    if missing:
        raise DataError(f"columns {', '.join(missing)} are missing; there are {', '.join(rows)}")
    responses = rows["responses"]
    for name in columns:
        if len(rows[name]) != len(responses):
            raise DataError(f"column {name} has {len(rows[name])} rows, not {len(responses)}")
        if name == "prompts":
            continue
        for row, (value, response) in enumerate(zip(rows[name], responses, strict=True)):
            if value.shape != response.shape:
                raise DataError(
                    f"row {row}: {name} has {len(value)} entries, its response {len(response)}"
                )
    empty = [row for row, prompt in enumerate(rows["prompts"]) if not len(prompt)]
    if empty:
        raise DataError(f"rows {empty} have no prompt token to predict the response from")
    return len(responses)
