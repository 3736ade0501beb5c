"""Snapshots: after every step, what a checkpoint holds, in this host's shared memory.

    /dev/shm/rollflow-<hash of the run folder's path>.snapshots/     mode 0700
      owner.json                         run folder, run id and host
      global_step_N/                     as in a run folder, see rlcore/trainer/checkpoint.py
      latest_checkpointed_iteration.txt  the pointer, written last
      .spare/                            the ranks' files of the one before

They are files: no process needs to live for them to be used. Once the newer one is complete, the
older is none any more; the ranks write the next one over its files, since new pages of shared
memory cost several times what a copy into old ones does. So the room of two is taken.

The death of a process costs no more than the step in which it happens; what a host takes with it
costs the steps since the last checkpoint.

A run that is over leaves none. One that crashed keeps the last for the attempt that continues it.
"""

import json
import logging
import os
import secrets
import socket
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from rlcore.errors import CheckpointError
from rlcore.trainer.checkpoint import Checkpoint, CheckpointStore, delete_tree
from rlcore.trainer.run_folder import RunFolder, write_atomically

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
OWNER = "owner.json"
PATTERN = "rollflow-*.snapshots"
SPARE = ".spare"


def snapshot_root(run_folder: Path, shared_memory: Path = SHARED_MEMORY) -> Path:
    """Return the folder in shared memory of the run in `run_folder`."""
    digest = sha256(str(run_folder.resolve()).encode()).hexdigest()[:24]
    return shared_memory / PATTERN.replace("*", digest)


class SnapshotStore(CheckpointStore):
    """The snapshots of one run on this host.

    Example:
        >>> store = SnapshotStore(folder)
        >>> store.save(global_step=7, attempt=1, trainer=content, write_actor=write)
        >>> store.steps()
        [7]
    """

    def __init__(self, folder: RunFolder, shared_memory: Path = SHARED_MEMORY) -> None:
        super().__init__(folder, root=snapshot_root(folder.path, shared_memory))

    def save(
        self,
        *,
        global_step: int,
        attempt: int,
        trainer: dict[str, Any],
        write_actor: Callable[[Path], None],
    ) -> Checkpoint:
        """Write snapshot `global_step` in the place of the ones before; see CheckpointStore.save.

        `write_actor` may find files of an older snapshot in its folder, to write over.

        Raises:
            FencedError: a later attempt has begun.
            CheckpointError: shared memory is full, another user's, or the ranks' is another host's.
        """
        self._make_root()
        # Shared memory has room for two: what an earlier try began is of no use to anyone.
        self._delete_left_overs(lambda _: True)

        def write(path: Path) -> None:
            if (self.root / SPARE).exists():
                (self.root / SPARE).rename(path)
            since = _now(path.parent)
            write_actor(path)
            if not _without_older(path, since):
                raise CheckpointError(
                    f"{path} was written by the training ranks and is not there: they run on "
                    "another host than this phase; set trainer.snapshots=false"
                )

        try:
            saved = super().save(
                global_step=global_step, attempt=attempt, trainer=trainer, write_actor=write
            )
        except OSError as error:
            raise CheckpointError(f"{self.root}: no snapshot can be written: {error}") from error
        self._keep_as_spare(lambda step: step < global_step)
        return saved

    def latest(self) -> Checkpoint | None:
        """Return the newest complete snapshot of this run, or None."""
        return super().latest() if self._is_of_this_run() else None

    def steps(self) -> list[int]:
        """Return the steps that have a complete snapshot, ascending."""
        return super().steps() if self._is_of_this_run() else []

    def rewind(self, checkpoint: Checkpoint, attempt: int) -> None:
        """Delete the snapshots after `checkpoint`: an attempt goes on from it."""
        self.folder.check_attempt(attempt)
        self._keep_as_spare(lambda step: step > checkpoint.global_step)

    def remove(self) -> None:
        """Delete all of them, and the folder."""
        if self._is_own():
            delete_tree(self.root)

    def move_to_disk(self, attempt: int) -> None:
        """Make the newest one a checkpoint in the run folder, and free the shared memory.

        That of step 0 holds nothing that was learnt: it goes.

        Raises:
            FencedError: a later attempt has begun.
            OSError: it cannot be copied; then it stays where it is.
        """
        newest = self.latest()
        if newest is not None and newest.global_step > 0:
            kept = CheckpointStore(self.folder).adopt(newest, attempt)
            logger.info("the last snapshot is kept as %s", kept.path)
        self.remove()

    def num_bytes(self) -> int:
        """Return what they take."""
        return size_of(self.root) if self._is_of_this_run() else 0

    def _keep_as_spare(self, is_meant: Callable[[int], bool]) -> None:
        """Undo snapshots; the next one may be written over the files of one of them."""
        for step in self.steps():
            if is_meant(step):
                # Renamed first: half of a snapshot is never taken for a complete one.
                hidden = self._hidden(step, ".deleted-" + secrets.token_hex(4))
                self._path(step).rename(hidden)
                if (hidden / "actor").is_dir() and not (self.root / SPARE).exists():
                    (hidden / "actor").rename(self.root / SPARE)
                delete_tree(hidden)

    def _make_root(self) -> None:
        """Make the folder with the name of its owner in it, both at once."""
        if self._is_of_this_run():
            return
        if self.root.exists() and not self._is_own():
            raise CheckpointError(
                f"{self.root} belongs to another user; remove it, or set trainer.snapshots=false"
            )
        self.remove()  # of a run that was in this folder before
        staged = self.root.with_name(f".{self.root.name}.{secrets.token_hex(4)}")
        try:
            staged.mkdir(mode=0o700)
            owner = {
                "run_folder": str(self.folder.path),
                "run_id": self.folder.run_id,
                "host": socket.gethostname(),
            }
            write_atomically(staged / OWNER, json.dumps(owner))
            staged.rename(self.root)
        except OSError as error:
            raise CheckpointError(
                f"{self.root} cannot be made: {error}; give this host shared memory "
                "(`docker run --shm-size`), or set trainer.snapshots=false"
            ) from error

    def _is_of_this_run(self) -> bool:
        return self._is_own() and _owner(self.root).get("run_id") == self.folder.run_id

    def _is_own(self) -> bool:
        """Whether this user made it: what another has put there is not read."""
        return self.root.is_dir() and self.root.stat().st_uid == os.getuid()


def _now(folder: Path) -> int:
    """Return the time of a file that is written now, nanoseconds."""
    file = folder / "now"
    file.touch()
    written = file.stat().st_mtime_ns
    file.unlink()
    return written


def _without_older(folder: Path, since: int) -> bool:
    """Remove files that were not written since then; return whether any was."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    older = [path for path in files if path.stat().st_mtime_ns < since]
    for path in older:
        path.unlink()
    return len(files) > len(older)


def newest_saved(
    folder: RunFolder, *, with_snapshots: bool, shared_memory: Path = SHARED_MEMORY
) -> Checkpoint | None:
    """Return where a run goes on: at its newest snapshot or checkpoint; None if it has neither.

    Args:
        folder: Of the run.
        with_snapshots: Off: at its newest checkpoint.
        shared_memory: Where snapshots lie.

    Raises:
        CheckpointError: see CheckpointStore.latest.
    """
    checkpoint = CheckpointStore(folder).latest()
    snapshot = SnapshotStore(folder, shared_memory).latest() if with_snapshots else None
    found = [saved for saved in (checkpoint, snapshot) if saved is not None]
    return max(found, key=lambda saved: saved.global_step, default=None)


def saved_at(folder: RunFolder, step: int) -> Checkpoint | None:
    """Return the snapshot or else the checkpoint of a step, or None."""
    for store in (SnapshotStore(folder), CheckpointStore(folder)):
        if step in store.steps():
            return store.at(step)
    return None


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def leftovers(shared_memory: Path = SHARED_MEMORY) -> list[Path]:
    """Return where this user's snapshots of runs lie whose folders are gone."""
    found: list[Path] = []
    for root in sorted(shared_memory.glob(PATTERN)):
        try:
            is_own = root.stat().st_uid == os.getuid()
        except FileNotFoundError:  # its run has just ended
            continue
        owner = _owner(root)
        # Containers that share this memory do not see each other's run folders.
        if is_own and owner.get("host") == socket.gethostname() and not _has_run(owner):
            found.append(root)
    return found


def remove_leftovers(shared_memory: Path = SHARED_MEMORY) -> list[Path]:
    """Remove this user's snapshots of runs whose folders are gone; return which."""
    found = leftovers(shared_memory)
    for root in found:
        delete_tree(root)
    return found


def _has_run(owner: dict[str, str]) -> bool:
    """Whether the run that a folder of snapshots belongs to is still in its run folder."""
    path = Path(owner["run_folder"])
    return (path / "run.json").is_file() and RunFolder.open(path).run_id == owner["run_id"]


def _owner(root: Path) -> dict[str, str]:
    try:
        return json.loads((root / OWNER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
