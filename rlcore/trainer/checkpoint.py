"""Checkpoints of a run: staged, renamed, pointer last.

    global_step_N/
      actor/                 weights (safetensors), optimizer, RNG, counters, stored metrics
      trainer.json           format version, step, trainer.state, ledger copy
      config.json            the resolved configuration
      references/            one file per thing that refers to this checkpoint; kept while not empty
    latest_checkpointed_iteration.txt      the pointer, written last

Checkpoint N is the state after step N was committed: the ledger in it holds no lease of a step
<= N.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.errors import CheckpointError
from rlcore.trainer.run_folder import RunFolder, write_atomically

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
POINTER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    global_step: int

    @property
    def actor_path(self) -> Path:
        """The folder that the training worker wrote."""
        return self.path / "actor"

    def load_trainer(self) -> dict[str, Any]:
        """Return {format_version, global_step, state, ledger}.

        Raises:
            CheckpointError: the file is missing, broken or of a later format.
        """
        file = self.path / "trainer.json"
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error
        if content.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{file}: format {content.get('format_version')}, this version reads "
                f"{FORMAT_VERSION}; use the rollflow version that wrote it"
            )
        return content


class CheckpointStore:
    """The checkpoints in one run folder."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def save(
        self,
        *,
        global_step: int,
        attempt: int,
        trainer: dict[str, Any],
        write_actor: Callable[[Path], None],
    ) -> Checkpoint:
        """Write checkpoint `global_step`; a repeat replaces an equal step's folder.

        Args:
            global_step: The step whose end this is.
            attempt: Refused when a later attempt of the run has begun.
            trainer: `state` and `ledger`, JSON values.
            write_actor: Writes the training worker's part into the folder it is given.

        Raises:
            FencedError: a later attempt has begun.
        """
        final = self.folder.path / f"global_step_{global_step}"
        staged = self.folder.path / f".global_step_{global_step}.attempt-{attempt}.tmp"
        shutil.rmtree(staged, ignore_errors=True)
        (staged / "references").mkdir(parents=True)
        write_actor(staged / "actor")
        content = {"format_version": FORMAT_VERSION, "global_step": global_step, **trainer}
        write_atomically(staged / "trainer.json", json.dumps(content))
        shutil.copy(self.folder.path / "config.json", staged / "config.json")
        _fsync_tree(staged)
        self.folder.check_attempt(attempt)
        if final.exists():
            shutil.rmtree(final)
        staged.rename(final)
        _fsync(self.folder.path)
        write_atomically(self.folder.path / POINTER, str(global_step))
        return Checkpoint(path=final, global_step=global_step)

    def latest(self) -> Checkpoint | None:
        """Return the checkpoint that the pointer names, or None.

        Raises:
            CheckpointError: the pointer names a folder that is not there.
        """
        pointer = self.folder.path / POINTER
        if not pointer.exists():
            return None
        return self.at(int(pointer.read_text(encoding="utf-8").strip()))

    def at(self, global_step: int) -> Checkpoint:
        """Return the checkpoint of a step.

        Raises:
            CheckpointError: there is none; the message lists those that exist.
        """
        path = self.folder.path / f"global_step_{global_step}"
        if not (path / "trainer.json").is_file():
            raise CheckpointError(
                f"{path}: no complete checkpoint; steps that have one: {self.steps() or 'none'}"
            )
        return Checkpoint(path=path, global_step=global_step)

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, ascending."""
        found = self.folder.path.glob("global_step_*/trainer.json")
        return sorted(int(file.parent.name.removeprefix("global_step_")) for file in found)

    def rotate(self, keep: int | None, *, best_step: int | None) -> list[int]:
        """Delete all but the newest `keep` checkpoints; return the steps deleted.

        The best one (by validation) and those that something refers to are never deleted and do not
        count. None keeps all.
        """
        if keep is None:
            return []
        removable = [s for s in self.steps() if s != best_step and not self._is_referenced(s)]
        doomed = removable[: max(0, len(removable) - keep)]
        for step in doomed:
            shutil.rmtree(self.folder.path / f"global_step_{step}")
            logger.info("checkpoint of step %d deleted (max_actor_ckpt_to_keep=%d)", step, keep)
        return doomed

    def _is_referenced(self, step: int) -> bool:
        references = self.folder.path / f"global_step_{step}" / "references"
        return references.is_dir() and any(references.iterdir())


def checkpoint_from_path(path: Path) -> Checkpoint:
    """Return the checkpoint at `path`: `.../global_step_N`, or a sub-folder of it.

    Raises:
        CheckpointError: no part of the path is a checkpoint folder.
    """
    for folder in (path, *path.parents):
        if folder.name.startswith("global_step_") and (folder / "trainer.json").is_file():
            step = int(folder.name.removeprefix("global_step_"))
            return Checkpoint(path=folder.resolve(), global_step=step)
    raise CheckpointError(f"{path}: not a checkpoint; it must be a folder global_step_N of a run")


def _fsync_tree(root: Path) -> None:
    for directory, _, files in os.walk(root):
        for name in files:
            _fsync(Path(directory) / name)
        _fsync(Path(directory))


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
