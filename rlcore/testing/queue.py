"""Rows in memory: what phases use of QueueClient, without Ray."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from rlcore import schema
from rlcore.errors import DataError


class MemoryQueue:
    """A queue of one process.

    Example:
        >>> queue = MemoryQueue()
        >>> queue.put("run/train", ["u_0_0"], {"advantages": [advantage]})
    """

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], dict[str, Tensor]] = {}

    def put(
        self, partition_id: str, keys: Sequence[str], columns: Mapping[str, Sequence[Tensor]]
    ) -> None:
        """Write whole columns of the rows `keys`.

        Raises:
            DataError: a column is not in the schema or not of its type.
        """
        for name, values in columns.items():
            expected = schema.column(name).dtype
            for key, value in zip(keys, values, strict=True):
                if str(value.dtype) != f"torch.{expected}":
                    raise DataError(f"{name} of {key} is {value.dtype}, must be {expected}")
                self.rows.setdefault((partition_id, key), {})[name] = value.detach().clone()

    def get(
        self, partition_id: str, keys: Sequence[str], columns: Sequence[str]
    ) -> dict[str, list[Tensor]]:
        """Return per column one tensor per key.

        Raises:
            DataError: a row lacks a column.
        """
        lacking = [
            key for key in keys if set(columns) - self.rows.get((partition_id, key), {}).keys()
        ]
        if lacking:
            raise DataError(f"rows {lacking} lack one of the columns {list(columns)}")
        return {
            name: [self.rows[partition_id, key][name].clone() for key in keys] for name in columns
        }
