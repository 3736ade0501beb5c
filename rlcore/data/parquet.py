"""Parquet files in verl's row format: one reader and one writer, errors that name file and row."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlcore.errors import DataError


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows (`data_source`, `prompt`, `reward_model`, `extra_info`, ...) to one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)


def read_table(path: Path) -> pa.Table:
    """Return the file's rows.

    Raises:
        DataError: the file is missing, not parquet, damaged or holds no rows.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty")
    try:
        # Memory-mapped: a large file costs address space, not memory.
        table = pq.read_table(path, memory_map=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file ({error})") from error
    if table.num_rows == 0:
        raise DataError(f"{path}: the file has no rows")
    return table
