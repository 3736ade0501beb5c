"""Whether data files changed since they were looked at last: by contents, not by date."""

import glob
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlcore.trainer.run_folder import write_atomically

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """What one look found."""

    files: list[str]
    data_hash: str
    """Of the files' names and bytes."""
    verdict: Literal["New", "Unchanged", "Unsettled"]

    @property
    def is_new(self) -> bool:
        """Whether there is something that was not there at the last look."""
        return self.verdict == "New"

    def remember(self, state: Path) -> None:
        """Make the next look compare with this one."""
        state.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(state, json.dumps({"hash": self.data_hash, "files": self.files}) + "\n")


def look(patterns: Sequence[str], state: Path, *, settle_s: float) -> Seen:
    """Look at files.

    Args:
        patterns: Paths or glob patterns.
        state: What `Seen.remember` wrote.
        settle_s: A file that was written within so many seconds is not settled.
    """
    files = sorted({path for pattern in patterns for path in glob.glob(pattern, recursive=True)})
    newest = max((Path(file).stat().st_mtime for file in files), default=0.0)
    if files and time.time() - newest < settle_s:
        return Seen(files=files, data_hash="", verdict="Unsettled")
    data_hash = _hash(files)
    last = json.loads(state.read_text(encoding="utf-8"))["hash"] if state.is_file() else None
    is_new = bool(files) and data_hash != last
    return Seen(files=files, data_hash=data_hash, verdict="New" if is_new else "Unchanged")


def _hash(files: Sequence[str]) -> str:
    together = hashlib.sha256()
    for file in files:
        together.update(file.encode() + b"\0")
        with open(file, "rb") as opened:
            while chunk := opened.read(CHUNK_BYTES):
                together.update(chunk)
    return together.hexdigest()[:16]
