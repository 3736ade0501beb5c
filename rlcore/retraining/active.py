"""One retraining at a time; one that comes meanwhile leaves a note, and one more follows.

| who | order |
|---|---|
| the second | writes the note, then tries the lock: if it gets it, the first has just ended |
| the first | releases the lock, then takes the note |

So a note is never lost, and is taken once.
"""

import contextlib
import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlcore.errors import DeviceLockError
from rlcore.trainer.run_folder import HeldLock, write_atomically

LOCK, NOTES, TRAINED = "retrain.lock", "dirty", "trained.json"


@contextlib.contextmanager
def only_one(root: Path, holder: str, request: dict[str, Any]) -> Iterator[bool]:
    """Yield True where this is the only retraining of `root`; else leave a note and yield False."""
    notes = root / NOTES
    notes.mkdir(parents=True, exist_ok=True)
    # A note of its own for each, so that taking one back never takes another's.
    note = notes / f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.json"
    write_atomically(note, json.dumps(request) + "\n")
    lock = HeldLock(root / LOCK, holder=holder, what=f"retraining in {root}")
    try:
        lock.__enter__()
    except DeviceLockError:
        yield False
        return
    note.unlink()
    try:
        yield True
    finally:
        lock.__exit__(None, None, None)


def take_notes(root: Path) -> dict[str, Any] | None:
    """Take all notes that were left meanwhile; return the newest request, or None."""
    newest: dict[str, Any] | None = None
    for note in sorted((root / NOTES).glob("*.json")):
        mine = note.with_suffix(".taken")
        try:
            note.replace(mine)
        except FileNotFoundError:
            continue  # another took it
        newest = json.loads(mine.read_text(encoding="utf-8"))
        mine.unlink()
    return newest


def trained_hashes(root: Path) -> dict[str, str]:
    """Return data hash to run id of everything that was trained."""
    file = root / TRAINED
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def record_trained(root: Path, data_hash: str, run_id: str) -> None:
    """Remember that a run trained the data of a hash."""
    write_atomically(
        root / TRAINED, json.dumps({**trained_hashes(root), data_hash: run_id}, indent=2) + "\n"
    )
