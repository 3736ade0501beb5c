"""Checkpoints of a run: staged, renamed, pointer last.

    global_step_N/
      actor/                 weights (safetensors), optimizer, RNG, counters, stored metrics
      trainer.json           format version, step, attempt, trainer.state, ledger copy
      config.json            the resolved configuration
      references/            one file per thing that refers to this checkpoint; kept while not empty
    latest_checkpointed_iteration.txt      the pointer, written last

Checkpoint N is the state after step N was committed: the ledger in it holds no lease of a step
<= N. What is half written or half deleted has a hidden name, `.global_step_N.*.tmp`.
"""

import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.errors import CheckpointError
from rlcore.trainer.run_folder import RunFolder, fsync, write_atomically

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
        """Return {format_version, global_step, attempt, state, ledger}.

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
    """The checkpoints of one run.

    Args:
        folder: Of the run.
        root: Where they lie; None: in the run folder.
    """

    def __init__(self, folder: RunFolder, root: Path | None = None) -> None:
        self.folder = folder
        self.root = root or folder.path

    def save(
        self,
        *,
        global_step: int,
        attempt: int,
        trainer: dict[str, Any],
        write_actor: Callable[[Path], None],
    ) -> Checkpoint:
        """Write checkpoint `global_step`; a try that finds it complete only sets the pointer.

        One that another attempt left half done, without the pointer, is replaced; what referred to
        it refers to the new one.

        Args:
            global_step: The step whose end this is.
            attempt: Refused when a later attempt of the run has begun.
            trainer: `state` and `ledger`, JSON values.
            write_actor: Writes the training worker's part into the folder it is given.

        Raises:
            FencedError: a later attempt has begun.
        """
        final = self._path(global_step)
        if self._is_written_by(attempt, final):
            return self._point_to(global_step, attempt)
        own = f".attempt-{attempt}-"
        # Of attempts that died in the middle; an earlier try of this one may still be written.
        self._delete_left_overs(lambda name: own not in name)
        staged = self._hidden(global_step, own + secrets.token_hex(4))
        (staged / "references").mkdir(parents=True)
        write_actor(staged / "actor")
        content = {"format_version": FORMAT_VERSION, "global_step": global_step, **trainer}
        write_atomically(staged / "trainer.json", json.dumps({**content, "attempt": attempt}))
        shutil.copy(self.folder.path / "config.json", staged / "config.json")
        if (final / "references").is_dir():
            shutil.copytree(final / "references", staged / "references", dirs_exist_ok=True)
        _fsync_tree(staged)
        self.folder.check_attempt(attempt)
        if final.exists():
            final.rename(self._hidden(global_step, ".replaced-" + secrets.token_hex(4)))
        staged.rename(final)
        fsync(self.root)
        checkpoint = self._point_to(global_step, attempt)
        # The training worker does one thing at a time: it has left what earlier tries began.
        self._delete_left_overs(lambda _: True)
        return checkpoint

    def adopt(self, checkpoint: Checkpoint, attempt: int) -> Checkpoint:
        """Copy a complete checkpoint that lies elsewhere, and make it the latest.

        Raises:
            FencedError: a later attempt has begun.
        """
        step = checkpoint.global_step
        if step not in self.steps():
            staged = self._hidden(step, f".attempt-{attempt}-{secrets.token_hex(4)}")
            shutil.copytree(checkpoint.path, staged)
            _fsync_tree(staged)
            self.folder.check_attempt(attempt)
            staged.rename(self._path(step))
            fsync(self.root)
        return self._point_to(step, attempt)

    def _point_to(self, global_step: int, attempt: int) -> Checkpoint:
        self.folder.check_attempt(attempt)
        write_atomically(self.root / POINTER, str(global_step))
        return self.at(global_step)

    def _is_written_by(self, attempt: int, path: Path) -> bool:
        if not (path / "trainer.json").is_file():
            return False
        step = int(path.name.removeprefix("global_step_"))
        return Checkpoint(path=path, global_step=step).load_trainer().get("attempt") == attempt

    def latest(self) -> Checkpoint | None:
        """Return the checkpoint that the pointer names, or None.

        If that one is not there, the newest complete one before it.

        Raises:
            CheckpointError: the pointer names a folder that is not there, and there is none before.
        """
        pointer = self.root / POINTER
        if not pointer.exists():
            return None
        text = pointer.read_text(encoding="utf-8").strip()
        if not text.isdigit():
            raise CheckpointError(f"{pointer} holds {text[:40]!r} instead of a step number")
        named = int(text)
        complete = [step for step in self.steps() if step <= named]
        if complete and complete[-1] < named:
            logger.warning(
                "%s: checkpoint %d is not there; the newest before it is that of step %d",
                pointer, named, complete[-1],
            )  # fmt: skip
            return self.at(complete[-1])
        return self.at(named)

    def at(self, global_step: int) -> Checkpoint:
        """Return the checkpoint of a step.

        Raises:
            CheckpointError: there is none; the message lists those that exist.
        """
        path = self._path(global_step)
        if not (path / "trainer.json").is_file():
            raise CheckpointError(
                f"{path}: no complete checkpoint; steps that have one: {self.steps() or 'none'}"
            )
        return Checkpoint(path=path, global_step=global_step)

    def rewind(self, checkpoint: Checkpoint, attempt: int) -> None:
        """Make `checkpoint` the latest: an attempt goes on from it, and later ones are abandoned.

        They are kept as `abandoned_by_attempt_K/global_step_N`, out of the way of rotation. The
        pointer stays where it is if `checkpoint` lies elsewhere: a snapshot.
        """
        aside = self.root / f"abandoned_by_attempt_{attempt}"
        for step in self.steps():
            if step > checkpoint.global_step:
                aside.mkdir(exist_ok=True)
                self._path(step).rename(aside / f"global_step_{step}")
        if checkpoint.global_step in self.steps():
            write_atomically(self.root / POINTER, str(checkpoint.global_step))

    def steps(self) -> list[int]:
        """Return the steps that have a complete checkpoint, ascending."""
        found = self.root.glob("global_step_*/trainer.json")
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
            # Renamed first: half of a checkpoint is never taken for a complete one.
            hidden = self._hidden(step, ".deleted-" + secrets.token_hex(4))
            self._path(step).rename(hidden)
            delete_tree(hidden)
            logger.info("checkpoint of step %d deleted (max_actor_ckpt_to_keep=%d)", step, keep)
        return doomed

    def _is_referenced(self, step: int) -> bool:
        references = self._path(step) / "references"
        return references.is_dir() and any(references.iterdir())

    def _path(self, step: int) -> Path:
        return self.root / f"global_step_{step}"

    def _hidden(self, step: int, suffix: str) -> Path:
        return self.root / f".global_step_{step}{suffix}.tmp"

    def _delete_left_overs(self, is_meant: Callable[[str], bool]) -> None:
        for left_over in self.root.glob(".global_step_*.tmp"):
            if is_meant(left_over.name):
                delete_tree(left_over)


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


def delete_tree(path: Path) -> None:
    """Delete a folder that nobody uses; what resists is tried again by whoever comes next."""

    def tell(_: object, name: str, error: tuple[object, BaseException, object]) -> None:
        logger.warning("%s cannot be deleted yet: %s", name, error[1])

    shutil.rmtree(path, onerror=tell)


def _fsync_tree(root: Path) -> None:
    for directory, _, files in os.walk(root):
        for name in files:
            fsync(Path(directory) / name)
        fsync(Path(directory))
