"""The usable rows of a data set on disk: written once in one pass, read at random without holding.

    rows.jsonl       one row per line, chat messages under `raw_prompt`
    index.i64        per row: where its line ends, its file, its row in that file
    questions.u64    per row: digest of its question
    meta.json        `StoreMeta`

A store is a cache: it is named by a digest of what it was made of (files with size and time,
settings, tokenizer), so that a start, a resume or another process finds it ready. It is complete or
absent.
"""

import hashlib
import json
import mmap
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rlcore.data.rows import encode_row, question_of
from rlcore.errors import DataError

ROWS, INDEX, QUESTIONS, META = "rows.jsonl", "index.i64", "questions.u64", "meta.json"
UNUSED_DAYS = 30
"""A store that nobody opened for so long is deleted when another one is made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreMeta:
    """What was found while a store was written."""

    files: list[str]
    num_read: int
    """Rows that were looked at."""
    num_rows: int
    """Rows that are kept."""
    num_overlong: int
    """Rows left out because their prompt exceeds `data.max_prompt_length`."""
    num_truncated: int
    """Rows whose prompt will be cut by `data.truncation`."""
    rows_per_file: list[int]
    """Kept rows of each file, in the order of `files`."""
    data_sources: dict[str, str]
    """Data source -> its first row."""
    agent_names: dict[str, str]
    """`agent_name` -> its first row."""
    hidden_columns: list[str]
    """Columns whose names belong to fields of ours, which hide them."""
    tokens: dict[str, float]
    """`min`, `mean`, `max` of the prompts' lengths before any cut."""
    digest: str
    """Of all kept rows, in order."""
    duplicates: list[list[str]] = field(default_factory=list[list[str]])
    """[row, the earlier row with the same question] of the first few."""
    num_duplicates: int = 0


class RowStore:
    """Reads a store; a pickled one is a path.

    Raises:
        DataError: there is no complete store at `path`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = json.loads((path / META).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise DataError(f"{path}: no complete store of rows ({error})") from error
        self.meta = StoreMeta(**content)
        self._index = np.memmap(path / INDEX, dtype=np.int64, mode="r").reshape(-1, 3)
        with (path / ROWS).open("rb") as file:
            self._rows = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __reduce__(self) -> tuple[type["RowStore"], tuple[Path]]:
        return RowStore, (self.path,)

    def __len__(self) -> int:
        return self.meta.num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        begin = int(self._index[index - 1, 0]) if index else 0
        return json.loads(self._rows[begin : int(self._index[index, 0])])

    def origin(self, index: int) -> str:
        """Return `file row N` (from 0) of a kept row."""
        _, file, row = self._index[index]
        return f"{self.meta.files[file]} row {row}"

    def questions(self) -> np.ndarray:
        """Return one 64-bit digest per row; equal ones are very likely the same question."""
        return np.fromfile(self.path / QUESTIONS, dtype=np.uint64)

    def question(self, index: int) -> str:
        """Return the text by which two rows count as the same question."""
        return question_of(self[index]["raw_prompt"])


class StoreWriter:
    """Appends rows to a staged store."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self.folder = folder
        self.files = files
        self._streams: dict[str, BinaryIO] = {
            name: (folder / name).open("wb") for name in (ROWS, INDEX, QUESTIONS)
        }
        self._hash = hashlib.blake2b(digest_size=16)
        self._end = 0
        self.rows_per_file = [0] * len(files)

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return sum(self.rows_per_file)

    def append(self, row: Mapping[str, Any], file: int, number: int) -> None:
        """Keep a row.

        Raises:
            DataError: a value is no JSON; names it.
        """
        line = encode_row(row, f"{self.files[file]} row {number}")
        question = question_of(row["raw_prompt"]).encode("utf-8")
        self._hash.update(line)
        self._end += len(line)
        self._streams[ROWS].write(line)
        self._streams[INDEX].write(np.array([self._end, file, number], np.int64).tobytes())
        self._streams[QUESTIONS].write(hashlib.blake2b(question, digest_size=8).digest())
        self.rows_per_file[file] += 1

    def finish(self, **found: Any) -> None:
        """Close the files and write what was found."""
        self.close()
        meta = StoreMeta(
            files=self.files,
            num_rows=self.num_rows,
            rows_per_file=self.rows_per_file,
            digest=self._hash.hexdigest(),
            **found,
        )
        (self.folder / META).write_text(json.dumps(asdict(meta)), encoding="utf-8")

    def close(self) -> None:
        """Close the files."""
        for stream in self._streams.values():
            stream.close()


@contextmanager
def staged_store(cache: Path, name: str, files: list[str]) -> Iterator[StoreWriter]:
    """Yield a writer whose store appears as `cache / name` when the block ends without an error.

    Raises:
        DataError: the folder cannot be written to.
    """
    staging = cache / f".{name}-{uuid.uuid4().hex[:8]}"
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise DataError(
            f"{cache} (data.cache_dir) is not writable: {error.strerror}; set data.cache_dir"
        ) from error
    try:
        writer = StoreWriter(staging, files)
        try:
            yield writer
        finally:
            writer.close()
        try:
            os.rename(staging, cache / name)
        except OSError:
            # Another process was first: what it wrote is the same.
            if not (cache / name / META).is_file():
                raise
        _delete_unused(cache)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def open_store(cache: Path, name: str) -> RowStore | None:
    """Return a store that is there, or None."""
    path = cache / name
    if not (path / META).is_file():
        return None
    os.utime(path)  # says when it was used
    return RowStore(path)


def _delete_unused(cache: Path) -> None:
    oldest = time.time() - UNUSED_DAYS * 24 * 3600
    for path in cache.iterdir():
        if path.is_dir() and path.stat().st_mtime < oldest:
            shutil.rmtree(path, ignore_errors=True)
