"""Parquet files: a writer, and a reader that streams and never holds a whole file."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlcore.errors import DataError

MAGIC = b"PAR1"
CHUNK_ROWS = 1024
ROWS_PER_GROUP = 16_384
"""A reader holds one group's pages at a time."""


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows (`data_source`, `prompt`, `reward_model`, `extra_info`, ...) to one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=ROWS_PER_GROUP)


class ParquetSource:
    """The rows of one parquet file.

    Raises:
        DataError: the file is of another kind, truncated or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.schema: pa.Schema = self._open().schema_arrow

    def count(self) -> int:
        """Return the number of rows, from the footer."""
        return self._open().metadata.num_rows

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield row number (from 0) and columns.

        Raises:
            DataError: a page is damaged; names the row before it.
        """
        number = 0
        file = self._open()
        try:
            for batch in file.iter_batches(batch_size=CHUNK_ROWS, use_threads=False):
                try:
                    rows = batch.to_pylist()
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{self.path}: a text in rows {number} to {number + len(batch) - 1} is no "
                        f"UTF-8 ({error})"
                    ) from error
                for row in rows:
                    yield number, row
                    number += 1
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(
                f"{self.path}: damaged after row {number} ({error}); write the file again"
            ) from error
        finally:
            file.close()

    def _open(self) -> pq.ParquetFile:
        try:
            # A buffered stream reads a column's pages one after the other, where the default
            # would read the column of a whole row group at once.
            return pq.ParquetFile(self.path, buffer_size=1 << 20, pre_buffer=False)
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{self.path}: {self._what_is_wrong(error)}") from error

    def _what_is_wrong(self, error: Exception) -> str:
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            begins = file.read(4) == MAGIC
            file.seek(max(0, size - 4))
            ends = file.read(4) == MAGIC
        if begins and not ends:
            return (
                f"a truncated parquet file: {size} bytes without the footer that ends one; "
                "copy or write it again"
            )
        return f"not a readable parquet file ({error})"
