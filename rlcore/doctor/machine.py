"""Cores, memory, shared memory and disk."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from rlcore.doctor.findings import Finding, gibibytes

SHARED_MEMORY = Path("/dev/shm")
_LEAST_MEMORY = 4 * 1024**3
_LEAST_SHARED = 1024**3
_LEAST_DISK = 5 * 1024**3
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def check_machine(runs_root: Path, environment: Mapping[str, str]) -> list[Finding]:
    """Return what the machine offers."""
    return [
        cores(len(os.sched_getaffinity(0)), _quota(_QUOTA), environment),
        memory(psutil.virtual_memory().available),
        shared_memory(SHARED_MEMORY),
        disk(runs_root),
    ]


def _quota(file: Path) -> float | None:
    """Return the cores that the container may use, or None without a limit."""
    try:
        quota, period = file.read_text(encoding="utf-8").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def cores(visible: int, quota: float | None, environment: Mapping[str, str]) -> Finding:
    """Return what this process may compute with."""
    if quota is not None and quota < visible:
        return Finding(
            level="warning",
            subject="cores",
            message=(
                f"{visible} are visible but the container may use {quota:g}: processes would "
                "start more threads than run at the same time"
            ),
            fix=f"set ray.num_threads={max(1, int(quota))}",
        )
    threads = environment.get("OMP_NUM_THREADS")
    if threads is not None and threads.isdigit() and int(threads) > visible:
        return Finding(
            level="warning",
            subject="cores",
            message=f"OMP_NUM_THREADS={threads} is more than the {visible} visible cores",
            fix="unset OMP_NUM_THREADS, and set ray.num_threads where fewer are wanted",
        )
    return Finding(level="ok", subject="cores", message=str(visible))


def _free_bytes(folder: Path) -> int:
    return psutil.disk_usage(str(folder)).free


def memory(available: int) -> Finding:
    """Return whether `available` bytes are enough for a small run."""
    if available >= _LEAST_MEMORY:
        return Finding(level="ok", subject="memory", message=f"{gibibytes(available)} free")
    return Finding(
        level="warning",
        subject="memory",
        message=f"{gibibytes(available)} free, {gibibytes(_LEAST_MEMORY)} is little enough",
        fix="end other processes; `rollflow check PRESET` shows what a run takes",
    )


def shared_memory(folder: Path, free_bytes: Callable[[Path], int] = _free_bytes) -> Finding:
    """Return whether weights and Ray's objects fit into the shared memory at `folder`."""
    subject = f"shared memory ({folder})"
    try:
        free = free_bytes(folder)
    except OSError as error:
        return Finding(
            level="error",
            subject=subject,
            message=f"weights travel through it, and it cannot be read: {error}",
            fix="mount a tmpfs there",
        )
    if free >= _LEAST_SHARED:
        return Finding(level="ok", subject=subject, message=f"{gibibytes(free)} free")
    return Finding(
        level="warning",
        subject=subject,
        message=f"{gibibytes(free)} free; Ray's objects, published weights and snapshots lie there",
        fix="start the container with a larger one (docker run --shm-size=4g), or remove leftovers",
    )


def disk(runs_root: Path, free_bytes: Callable[[Path], int] = _free_bytes) -> Finding:
    """Return whether runs can be written."""
    # The nearest folder that is there: the runs' own is made by the first run.
    folder = next(
        path for path in (runs_root.absolute(), *runs_root.absolute().parents) if path.is_dir()
    )
    subject = f"disk ({runs_root})"
    if not os.access(folder, os.W_OK):
        return Finding(
            level="error",
            subject=subject,
            message=f"{folder} is not writable",
            fix="set trainer.runs_root to a folder of yours",
        )
    free = free_bytes(folder)
    if free >= _LEAST_DISK:
        return Finding(level="ok", subject=subject, message=f"{gibibytes(free)} free")
    return Finding(
        level="warning",
        subject=subject,
        message=f"{gibibytes(free)} free; a checkpoint is 16 bytes per parameter",
        fix="free some, set trainer.runs_root elsewhere, or trainer.max_actor_ckpt_to_keep",
    )
