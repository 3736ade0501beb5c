"""The ledger's journal: one JSON object a line, flushed before the ledger answers.

One process writes a journal at a time. The end of a line that was being written when its process
was killed is dropped when the file is opened again: nobody has had an answer for it.
"""

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlcore.errors import CheckpointError, DataError

Event = dict[str, Any]

CHUNK_BYTES = 1 << 16


class Journal:
    """Appends events to a file and reads them back."""

    def __init__(self, path: str | Path) -> None:
        """Open or create the file at `path`.

        Raises:
            CheckpointError: a living process writes this journal.
        """
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise CheckpointError(
                f"{self.path} is being written by another ledger; the attempt that owns it is "
                "still alive"
            ) from None
        self._file.truncate(_whole_length(self.path))

    def append(self, event: Event) -> Event:
        """Write `event` and return it as a reader will find it (tuples as lists, say).

        Raises:
            DataError: the event holds something that JSON cannot carry.
        """
        try:
            line = json.dumps(event, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the ledger takes plain values only (numbers, text, lists, dicts): {error}"
            ) from error
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        return json.loads(line)

    def close(self) -> None:
        """Close the file; another ledger may then open it."""
        self._file.close()


def read_journal(path: str | Path) -> Iterator[Event]:
    """Yield the events of a journal, without a torn last line.

    Raises:
        CheckpointError: the file is missing, or a line before the end is not JSON.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no ledger journal at {path}")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise CheckpointError(f"{path} line {number} is not JSON: {error}") from error


def has_events(path: str | Path) -> bool:
    """Whether a ledger has written to the journal at `path` before."""
    return Path(path).is_file() and any(True for _ in read_journal(path))


def _whole_length(path: Path) -> int:
    """Return the length of the file up to and including its last line end."""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        while end > 0:
            start = max(0, end - CHUNK_BYTES)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0
