"""The run folder: what a training run leaves behind, and the number of the attempt that owns it.

    <run folder>/
      run.json                     run id, preset, overrides, attempts with their times and ends
      config.json                  the resolved configuration
      run.lock                     held by the living attempt
      global_step_N/               checkpoints (rlcore/trainer/checkpoint.py)
      latest_checkpointed_iteration.txt
      model/                       the trained model as a Hugging Face folder
      metrics.jsonl tensorboard/ curves/ generations/ journal/

The attempt number is the fencing token: it only grows, and every collaborator refuses a lower one.
"""

import json
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rlcore.errors import CheckpointError, ConfigError, DeviceLockError, FencedError


def new_run_id(experiment_name: str) -> str:
    """Return a fresh run id: readable, sorted by time, without underscore or slash."""
    stem = "".join(c if c.isalnum() else "-" for c in experiment_name).strip("-").lower()
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def write_atomically(path: Path, text: str) -> None:
    """Replace the file at `path` by `text`, so that a reader sees the old or the new one whole.

    The new one is on disk when this returns.
    """
    staged = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with staged.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """Have a file, or the names in a folder, on disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """A run's folder, opened by one attempt.

    Example:
        >>> folder = RunFolder.create(Path("runs/x"), run_id="x", request={"preset": "grpo-tiny"})
        >>> with folder.hold():
        ...     attempt = folder.begin_attempt(max_attempts=3)
    """

    path: Path
    run_id: str

    @classmethod
    def create(cls, path: Path, *, run_id: str, request: dict[str, Any]) -> "RunFolder":
        """Make the folder of a new run; `request` is what `resume` needs to start it again.

        Raises:
            ConfigError: the folder cannot be written.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder = cls(path=path.resolve(), run_id=run_id)
            if not folder._record.exists():
                folder._write({"run_id": run_id, "request": request, "attempts": []})
            held = folder.record()["run_id"]
        except OSError as error:
            raise ConfigError(
                f"trainer.default_local_dir/runs_root: cannot write {path}: {error.strerror}; "
                "choose a folder that you may write to"
            ) from error
        if held != run_id:
            raise ConfigError(f"{path} holds run {held}, not {run_id}; choose another folder")
        return folder

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Open the folder of an existing run.

        Raises:
            CheckpointError: there is no run in it.
        """
        record = path / "run.json"
        if not record.is_file():
            raise CheckpointError(
                f"{path} holds no run (no run.json); list runs with `ls {path.parent}`"
            )
        run_id = json.loads(record.read_text(encoding="utf-8"))["run_id"]
        return cls(path=path.resolve(), run_id=run_id)

    @property
    def _record(self) -> Path:
        return self.path / "run.json"

    def record(self) -> dict[str, Any]:
        """Return the contents of run.json."""
        return json.loads(self._record.read_text(encoding="utf-8"))

    def _write(self, record: dict[str, Any]) -> None:
        write_atomically(self._record, json.dumps(record, indent=2) + "\n")

    def hold(self) -> "HeldLock":
        """Return a context manager that holds the folder for this process.

        Raises:
            DeviceLockError: another process holds it; the message names its run and pid.
        """
        return HeldLock(self.path / "run.lock", holder=f"run {self.run_id}", what=str(self.path))

    def begin_attempt(
        self,
        *,
        max_attempts: int,
        overrides: dict[str, Any] | None = None,
        flow_run_id: str | None = None,
    ) -> int:
        """Count and return this attempt's number, from 1. Call it while the folder is held.

        Args:
            max_attempts: Of the run.
            overrides: What this attempt was asked for over the preset, kept for the next one.
            flow_run_id: What executes this attempt, by which it is found again.

        Raises:
            CheckpointError: the run has used its attempts.
        """
        record = self.record()
        attempt = len(record["attempts"]) + 1
        if attempt > max_attempts:
            raise CheckpointError(
                f"run {self.run_id} has used its {max_attempts} attempts (trainer.max_attempts); "
                "raise trainer.max_attempts to go on"
            )
        record["attempts"].append(
            {
                "attempt": attempt,
                "pid": os.getpid(),
                "began": time.time(),
                "overrides": overrides or {},
                "flow_run_id": flow_run_id,
            }
        )
        self._write(record)
        return attempt

    def end_attempt(self, attempt: int, outcome: str, message: str = "") -> None:
        """Record how an attempt ended.

        Args:
            attempt: Its number.
            outcome: finished, failed, crashed, cancelled (by a person), terminated (SIGTERM of a
                host that shuts down) or suspended.
            message: Why.
        """
        record = self.record()
        record["attempts"][attempt - 1].update(
            ended=time.time(), outcome=outcome, message=message[:2000]
        )
        self._write(record)

    def last_overrides(self) -> dict[str, Any]:
        """Return the overrides of the newest attempt, which the next one goes on with."""
        record = self.record()
        newest = record["attempts"][-1] if record["attempts"] else {}
        return newest.get("overrides", record["request"]["overrides"])

    def check_attempt(self, attempt: int) -> None:
        """Refuse an attempt that a later one has replaced.

        Raises:
            FencedError: a later attempt has begun.
        """
        latest = len(self.record()["attempts"])
        if latest > attempt:
            raise FencedError(f"run {self.run_id}: attempt {attempt} was replaced by {latest}")


class HeldLock:
    """A file lock that names its holder; released by the kernel when the process dies."""

    def __init__(self, path: Path, *, holder: str, what: str) -> None:
        # Taken and released by whichever thread; one process holds it, not one thread.
        self._lock = FileLock(path, thread_local=False)
        self._note = path.with_suffix(".holder")
        self._holder = holder
        self._what = what

    def current_holder(self) -> str:
        """Return who holds the lock, as it last said itself."""
        try:
            return self._note.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return "a process that has not said its name"

    def __enter__(self) -> "HeldLock":
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:  # an OSError, too
            raise DeviceLockError(
                f"{self._what} is held by {self.current_holder()}; wait for it to end"
            ) from error
        except OSError as error:
            raise DeviceLockError(
                f"{self._what} cannot be locked: {self._lock.lock_file}: {error.strerror}; does it "
                "belong to another user?"
            ) from error
        write_atomically(
            self._note, f"{self._holder} (pid {os.getpid()} on {socket.gethostname()})\n"
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._note.unlink(missing_ok=True)
        self._lock.release()
