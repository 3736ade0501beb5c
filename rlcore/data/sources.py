"""Opens what `data.train_files` names: parquet, JSON lines, or a saved Hugging Face data set."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from rlcore.data.jsonl import JsonLinesSource
from rlcore.data.parquet import MAGIC, ParquetSource
from rlcore.data.saved_dataset import SavedDatasetSource
from rlcore.errors import DataError

JSON_LINES = {".jsonl", ".ndjson", ".json"}


class Source(Protocol):
    """Rows that are read in order, as often as wanted, without holding them."""

    path: Path

    @property
    def schema(self) -> pa.Schema | None:
        """Of all rows; None where each row has columns of its own."""
        ...

    def count(self) -> int:
        """Return the number of rows."""
        ...

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield row number and columns."""
        ...


def open_source(path: Path) -> Source:
    """Return the rows behind a path.

    Raises:
        DataError: nothing is there, the file is empty, of another kind or damaged, or has no rows.
    """
    if path.is_dir():
        source: Source = SavedDatasetSource(path)
    else:
        source = _open_file(path)
    if source.count() == 0:
        raise DataError(f"{path}: the file has no rows")
    return source


def _open_file(path: Path) -> Source:
    if not path.exists():
        raise DataError(f"{path}: no such file")
    if not path.is_file():
        raise DataError(f"{path}: neither a file nor a folder")
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if not head:
        raise DataError(f"{path}: the file is empty")
    if path.suffix in JSON_LINES:
        if head.lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"["):
            raise DataError(f"{path}: one JSON array; write JSON lines, one object per line")
        return JsonLinesSource(path)
    if path.suffix == ".parquet" or head.startswith(MAGIC):
        return ParquetSource(path)
    raise DataError(
        f"{path}: not a readable parquet file, and no .jsonl; "
        "`rollflow prepare questions file=FILE` makes a data set of questions and answers"
    )
