"""The file in shared memory that a run's weights are published to: whose it is, and its end.

Its owner, a training worker, holds a lock that the kernel drops when the process dies. A file that
nobody holds is what a killed run has left, and the next run removes it: shared memory is scarce.
"""

import fcntl
import os
import time
from pathlib import Path

from rlcore.errors import DeadlineExceededError

HOLD_S = 10.0
"""How long the killed owner of an earlier attempt may take to be dead."""


def segment_path(directory: str | Path, run_id: str) -> Path:
    """Return the file in shared memory that the run's weights are published to."""
    return Path(directory) / f"rollflow-{run_id}.weights"


def hold_segment(path: Path, wait_s: float = HOLD_S) -> int:
    """Make the segment's file and hold it until this process ends; return its descriptor.

    Raises:
        DeadlineExceededError: another process holds it for `wait_s`.
    """
    ends = time.monotonic() + wait_s
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        # Not the same file: it was taken for a leftover before it was locked.
        if _is_locked(descriptor) and _is_at(path, descriptor):
            return descriptor
        os.close(descriptor)
        if time.monotonic() > ends:
            raise DeadlineExceededError(
                f"the trainer waited {wait_s:g} s for {path}, which the trainer of another attempt "
                "of this run holds"
            )
        time.sleep(0.1)


def is_held(path: Path) -> bool:
    """Whether a living process holds the segment; another user's counts as held."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except (FileNotFoundError, PermissionError):
        return True
    try:
        return not _is_locked(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(directory: str | Path) -> list[Path]:
    """Remove the segments whose owners are dead; return which."""
    removed: list[Path] = []
    for path in Path(directory).glob(segment_path("", "*").name):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except (FileNotFoundError, PermissionError):  # gone meanwhile, or another user's
            continue
        try:
            if _is_locked(descriptor):
                path.unlink(missing_ok=True)
                removed.append(path)
        finally:
            os.close(descriptor)
    return removed


def _is_locked(descriptor: int) -> bool:
    """Try to lock; the lock ends with the descriptor."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
