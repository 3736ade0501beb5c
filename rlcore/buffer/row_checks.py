"""What the queue's adapter asks of rows before they are written and after they were read."""

from collections.abc import Mapping, Sequence

import torch

from rlcore import schema
from rlcore.errors import DataError

MAX_NAMED_KEYS = 8
"""How many keys an error message names."""


def check_keys(keys: Sequence[str]) -> None:
    """Refuse keys that are given twice.

    Raises:
        DataError: names them.
    """
    if len(set(keys)) != len(keys):
        twice = sorted({key for key in keys if list(keys).count(key) > 1})
        raise DataError(f"row keys are given twice: {named(twice)}")


def check_columns(
    keys: Sequence[str], columns: Mapping[str, Sequence[torch.Tensor]], what: str
) -> None:
    """Hold the columns to the schema: known names, one 1-D tensor per key, one length per row.

    Args:
        keys: Row keys.
        columns: Per column one 1-D tensor per key.
        what: Beginning of the error message.

    Raises:
        DataError: names column and row.
    """
    if not columns:
        raise DataError(f"{what}: no column")
    lengths: dict[str, tuple[str, list[int]]] = {}
    for name, rows in columns.items():
        column = schema.column(name)
        if len(rows) != len(keys):
            raise DataError(f"{what}: column {name} has {len(rows)} rows for {len(keys)} keys")
        dtype = getattr(torch, column.dtype)
        for key, row in zip(keys, rows, strict=True):
            if row.dtype != dtype or row.dim() != 1:
                raise DataError(
                    f"{what}: column {name} of row {key} is {row.dtype} with {row.dim()} "
                    f"dimensions, must be {column.dtype} with 1"
                )
        sizes = [len(row) for row in rows]
        first, expected = lengths.setdefault(column.length, (name, sizes))
        for key, size, other in zip(keys, sizes, expected, strict=True):
            if size != other:
                raise DataError(
                    f"{what}: row {key} has {size} entries in {name} and {other} in {first}"
                )


def named(keys: Sequence[str]) -> str:
    """Return the first keys and how many follow."""
    more = len(keys) - MAX_NAMED_KEYS
    return ", ".join(keys[:MAX_NAMED_KEYS]) + (f" and {more} more" if more > 0 else "")
