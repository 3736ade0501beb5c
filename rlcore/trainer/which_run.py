"""Which run an attempt belongs to: a new one, or one that lies in a folder already."""

from dataclasses import dataclass
from pathlib import Path

from rlcore.config import RunConfig
from rlcore.errors import ConfigError
from rlcore.trainer.checkpoint import Checkpoint, checkpoint_from_path
from rlcore.trainer.run_folder import RunFolder, new_run_id
from rlcore.trainer.snapshots import newest_saved


@dataclass(frozen=True, kw_only=True, slots=True)
class WhichRun:
    """The run of an attempt, before anything of it is written."""

    run_id: str
    path: Path
    is_new: bool
    """Whether nothing of it exists; a folder that others may write has to be asked again once the
    devices are held.
    """
    checkpoint: Checkpoint | None = None
    """Where it continues; None starts at step 0."""


def which_run(config: RunConfig, resume: str | None) -> WhichRun:
    """Decide by `resume` and `trainer.{resume_mode, resume_from_path, default_local_dir}`.

    Args:
        config: Of the attempt.
        resume: Run id whose last snapshot or checkpoint is continued; goes before the
            configuration.

    Raises:
        CheckpointError: the run or its checkpoint is not there.
        ConfigError: the folder holds a run that this attempt may not continue.
    """
    trainer = config.trainer
    if resume is not None:
        folder = RunFolder.open(config.run_folder(resume))
        if folder.run_id != resume:
            raise ConfigError(
                f"run {resume} cannot be continued: {folder.path} (trainer.default_local_dir or "
                f"runs_root) holds run {folder.run_id}; name that run, or its own folder"
            )
        return _continued(folder, trainer.snapshots)
    local = Path(trainer.default_local_dir) if trainer.default_local_dir else None
    if trainer.resume_mode == "resume_path":
        return _from_checkpoint(Path(str(trainer.resume_from_path)), local)
    if local is not None and (local / "run.json").is_file():
        held = RunFolder.open(local)
        if trainer.resume_mode == "disable":
            raise ConfigError(
                f"trainer.default_local_dir={local} holds run {held.run_id}, and "
                "trainer.resume_mode=disable does not continue it; choose another folder, or "
                "resume_mode=auto"
            )
        return _continued(held, trainer.snapshots)
    run_id = new_run_id(trainer.experiment_name)
    return WhichRun(run_id=run_id, path=config.run_folder(run_id), is_new=True)


def _continued(folder: RunFolder, with_snapshots: bool) -> WhichRun:
    latest = newest_saved(folder, with_snapshots=with_snapshots)
    return WhichRun(run_id=folder.run_id, path=folder.path, is_new=False, checkpoint=latest)


def _from_checkpoint(path: Path, local: Path | None) -> WhichRun:
    """A checkpoint is part of its run: it is continued as a new attempt of that run."""
    checkpoint = checkpoint_from_path(path)
    folder = RunFolder.open(checkpoint.path.parent)
    if local is not None and local.resolve() != folder.path:
        raise ConfigError(
            f"trainer.resume_from_path={path} is a checkpoint of run {folder.run_id} in "
            f"{folder.path}, but trainer.default_local_dir={local} is another folder; drop one"
        )
    return WhichRun(run_id=folder.run_id, path=folder.path, is_new=False, checkpoint=checkpoint)
