"""A snapshot: the rows of one retraining, named by the hash of what was new.

    <root>/evaluation/{test.parquet, evaluation.json}   frozen: held-out rows and their hash
    <root>/snapshots/<hash>/train.parquet               new rows and the replayed older ones
                           new.parquet                  the new rows alone, for later replays
                           rollflow_manifest.json       hash, files, counts

Rows whose question is in the evaluation set are kept out. The hash is of the new rows' contents,
whatever files and order they came in.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlcore.data.parquet import write_rows
from rlcore.data.rows import question_of
from rlcore.data.sources import open_source
from rlcore.data.staging import staged_folder
from rlcore.errors import DataError
from rlcore.trainer.run_folder import write_atomically

Row = dict[str, Any]

HASH_LENGTH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The training rows of one retraining."""

    data_hash: str
    """Of the new rows."""
    path: Path
    num_new: int
    num_replayed: int
    num_held_out: int
    """New rows that were left out, since the evaluation set has their question."""
    evaluation_hash: str
    files: tuple[str, ...]
    """Where the new rows came from."""

    @property
    def train_file(self) -> Path:
        """Return the file that is trained on."""
        return self.path / "train.parquet"


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The frozen evaluation set."""

    path: Path
    data_hash: str


def rows_of(files: Sequence[str | Path]) -> Iterator[Row]:
    """Yield the rows of data files, of any kind that `data.train_files` takes.

    Raises:
        DataError: a file cannot be read; names it.
    """
    for file in files:
        for _, row in open_source(Path(file)).rows():
            yield row


def row_hash(row: Mapping[str, Any]) -> str:
    """Return a hash of a row's contents; keys that hold nothing do not count."""
    text = json.dumps(_filled(row), sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def content_hash(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a hash of rows, whatever their order."""
    together = hashlib.sha256()
    for digest in sorted(map(row_hash, rows)):
        together.update(digest.encode())
    return together.hexdigest()[:HASH_LENGTH]


def _filled(value: Any) -> Any:
    # Files of one set may differ in columns that are null in all of their rows.
    if isinstance(value, Mapping):
        return {key: _filled(item) for key, item in value.items() if item is not None}
    return [_filled(item) for item in value] if isinstance(value, list) else value


def freeze_evaluation(root: Path, files: Sequence[str | Path]) -> Evaluation:
    """Return the evaluation set of `root`; the first call makes it from `files`.

    Raises:
        DataError: the frozen file is not what it was, or `files` now hold something else.
    """
    folder = root / "evaluation"
    file, note = folder / "test.parquet", folder / "evaluation.json"
    given = list(rows_of(files))
    if not note.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_rows(file, given)
        write_atomically(note, json.dumps({"hash": content_hash(given)}) + "\n")
    frozen = str(json.loads(note.read_text(encoding="utf-8"))["hash"])
    for what, rows in ((file, list(rows_of([file]))), ("data.val_files", given)):
        found = content_hash(rows)
        if found != frozen:
            raise DataError(
                f"{what} has hash {found}, but the evaluation set of {root} is frozen at {frozen}: "
                "results could not be compared; use another root for another evaluation set"
            )
    return Evaluation(path=file, data_hash=frozen)


def take_snapshot(
    root: Path,
    files: Sequence[str],
    evaluation: Evaluation,
    *,
    replay_fraction: float,
    prompt_key: str = "prompt",
) -> Snapshot:
    """Write the snapshot of `files`: their rows, and a share of all older snapshots' rows.

    Which older rows are replayed depends on the rows alone, so the same files give the same
    snapshot.

    Raises:
        DataError: a file cannot be read, or nothing is left to train on.
    """
    held_out = {question_of(row[prompt_key]) for row in rows_of([evaluation.path])}
    given = list(rows_of(files))
    new = [row for row in given if question_of(row[prompt_key]) not in held_out]
    if not new:
        raise DataError(f"{', '.join(files)}: every row's question is in the evaluation set")
    data_hash = content_hash(new)
    replayed = list(_replayed(root, new, data_hash, replay_fraction))
    snapshot = Snapshot(
        data_hash=data_hash,
        path=root / "snapshots" / data_hash,
        num_new=len(new),
        num_replayed=len(replayed),
        num_held_out=len(given) - len(new),
        evaluation_hash=evaluation.data_hash,
        files=tuple(files),
    )
    recipe = {key: str(value) for key, value in asdict(snapshot).items()}
    with staged_folder(snapshot.path, recipe) as folder:
        write_rows(folder / "new.parquet", new)
        write_rows(folder / "train.parquet", new + replayed)
    return snapshot


def _replayed(root: Path, new: Sequence[Row], data_hash: str, fraction: float) -> Iterator[Row]:
    seen = set(map(row_hash, new))
    older = sorted((root / "snapshots").glob("*/new.parquet"))
    for row in rows_of([file for file in older if file.parent.name != data_hash]):
        digest = row_hash(row)
        if digest in seen:
            continue
        seen.add(digest)
        if int(digest[:8], 16) < fraction * 2**32:
            yield row
