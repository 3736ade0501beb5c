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
        for left_over in self.folder.path.glob(".global_step_*.tmp"):
            shutil.rmtree(left_over)  # of a try or an attempt that died in the middle
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
        text = pointer.read_text(encoding="utf-8").strip()
        if not text.isdigit():
            raise CheckpointError(f"{pointer} holds {text[:40]!r} instead of a step number")
        return self.at(int(text))

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

    def rewind(self, checkpoint: Checkpoint, attempt: int) -> None:
        """Make `checkpoint` the latest: an attempt goes on from it, and later ones are abandoned.

        They are kept as `abandoned_by_attempt_K/global_step_N`, out of the way of rotation.
        """
        aside = self.folder.path / f"abandoned_by_attempt_{attempt}"
        for step in self.steps():
            if step > checkpoint.global_step:
                aside.mkdir(exist_ok=True)
                (self.folder.path / f"global_step_{step}").rename(aside / f"global_step_{step}")
        write_atomically(self.folder.path / POINTER, str(checkpoint.global_step))

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, ascending."""
        found = self.folder.path.glob("global_step_*/trainer.json")
        return sorted(int(file.parent.name.removeprefix("global_step_")) for file in found)

    def rotate(self, keep: int | None, *, best_step: int | None) -> list[int]:
        """Delete all but the newest `keep` checkpoints; return the steps deleted.

        The best one (by validation) and those that something refers to are never deleted and do not
        count; the one that the pointer names is never deleted and counts. None keeps all.
        """
        if keep is None:
            return []
        newest = self.latest()
        kept_steps = {best_step, newest.global_step if newest else None}
        removable = [s for s in self.steps() if s not in kept_steps and not self._is_referenced(s)]
        keep -= newest is not None and newest.global_step != best_step
        doomed = removable[: max(0, len(removable) - max(0, keep))]
        for step in doomed:
            shutil.rmtree(self.folder.path / f"global_step_{step}")
            logger.info("checkpoint of step %d deleted (max_actor_ckpt_to_keep=%d)", step, keep)
        return doomed

    def _is_referenced(self, step: int) -> bool:
        references = self.folder.path / f"global_step_{step}" / "references"
        return references.is_dir() and any(references.iterdir())


def best_step(scores: dict[str, float], *, among: list[int]) -> int | None:
    """Return the step with the best validation of those that have a checkpoint; first of equals.

    Args:
        scores: Step, as text, to held-out accuracy.
        among: Steps that have a checkpoint.
    """
    candidates = [step for step in sorted(among) if str(step) in scores]
    return max(candidates, key=lambda step: scores[str(step)], default=None)


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
