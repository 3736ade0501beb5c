"""Folders that the Hugging Face `datasets` library wrote by `save_to_disk`; read without it.

Such a folder holds state.json, which lists Arrow files in the stream format. A folder of several
splits holds dataset_dict.json and one such folder per split.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from rlcore.errors import DataError


class SavedDatasetSource:
    """The rows of one saved data set, over all its Arrow files.

    Raises:
        DataError: the folder is none, holds several splits, or a file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = _arrow_files(path)
        self.schema: pa.Schema = self._first_schema()

    def count(self) -> int:
        """Return the number of rows."""
        return sum(batch.num_rows for batch in self._batches())

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield row number (from 0, over all files) and columns.

        Raises:
            DataError: a file is damaged; names it.
        """
        number = 0
        for batch in self._batches():
            for row in batch.to_pylist():
                yield number, row
                number += 1

    def _batches(self) -> Iterator[pa.RecordBatch]:
        for file in self._files:
            try:
                with pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
                    yield from stream
            except (pa.ArrowInvalid, OSError) as error:
                raise DataError(f"{file}: not a readable Arrow file ({error})") from error

    def _first_schema(self) -> pa.Schema:
        file = self._files[0]
        try:
            with pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
                return stream.schema
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{file}: not a readable Arrow file ({error})") from error


def _arrow_files(path: Path) -> list[Path]:
    splits = path / "dataset_dict.json"
    if splits.is_file():
        names = json.loads(splits.read_text(encoding="utf-8")).get("splits", [])
        raise DataError(
            f"{path}: a data set with the splits {', '.join(names)}; name one, for instance "
            f"{path / (names[0] if names else 'train')}"
        )
    state = path / "state.json"
    if not state.is_file():
        raise DataError(
            f"{path}: a folder without state.json; folders are read as data sets that `datasets` "
            "wrote by save_to_disk, so name its .parquet or .jsonl files instead"
        )
    try:
        listed = json.loads(state.read_text(encoding="utf-8"))["_data_files"]
        files = [path / entry["filename"] for entry in listed]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(f"{state}: not what save_to_disk writes ({error!r})") from error
    missing = [file for file in files if not file.is_file()]
    if missing or not files:
        raise DataError(f"{path}: {missing[0] if missing else 'its data file'}: no such file")
    return files
