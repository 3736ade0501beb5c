"""What runs left behind whose process died without a word."""

import json
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from rlcore.checkpoint_engine.segment_file import is_held, segment_path
from rlcore.doctor.findings import Finding, gibibytes
from rlcore.doctor.machine import SHARED_MEMORY
from rlcore.trainer.snapshots import leftovers, size_of

_RAY_PROCESSES = frozenset({"raylet", "gcs_server"})


def check_leftovers(runs_root: Path, shared: Path = SHARED_MEMORY) -> list[Finding]:
    """Return what dead runs left, or one finding that there is nothing."""
    records = list(_records(runs_root))
    found = [
        *(
            _of_run(folder, record)
            for folder, record in records
            if _ended_silently(record) and not _is_held_elsewhere(folder)
        ),
        *_segments(shared),
        *_snapshots(shared),
        *_ray_processes(),
    ]
    return found or [Finding(level="ok", subject="leftovers", message="none")]


def _records(runs_root: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for file in sorted(runs_root.glob("*/run.json")):
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(record, dict) and record.get("run_id"):
            yield file.parent, record


def _last_attempt(record: dict[str, Any]) -> dict[str, Any]:
    attempts = record.get("attempts") or [{}]
    return attempts[-1]


def _is_alive(record: dict[str, Any]) -> bool:
    attempt = _last_attempt(record)
    if "outcome" in attempt or not isinstance(attempt.get("pid"), int):
        return False
    try:
        # A pid is reused; a process that began after the attempt is another one.
        return psutil.Process(attempt["pid"]).create_time() <= attempt.get("began", 0) + 1
    except psutil.NoSuchProcess:
        return False


def _ended_silently(record: dict[str, Any]) -> bool:
    attempt = _last_attempt(record)
    return bool(attempt) and "outcome" not in attempt and not _is_alive(record)


def _is_held_elsewhere(folder: Path) -> bool:
    """Whether another host that shares the folder says that it runs there."""
    try:
        holder = (folder / "run.holder").read_text(encoding="utf-8").strip()
    except OSError:
        return False
    return not holder.endswith(f" on {socket.gethostname()})")


def _of_run(folder: Path, record: dict[str, Any]) -> Finding:
    run_id, number = record["run_id"], len(record["attempts"])
    return Finding(
        level="warning",
        subject=f"run {run_id}",
        message=f"attempt {number} in {folder} ended without a word (killed, or the host failed)",
        fix=f"`rollflow resume {folder}` continues it; removing the folder forgets it",
    )


def _segments(shared: Path) -> Iterator[Finding]:
    for file in sorted(shared.glob(segment_path("", "*").name)):
        if not is_held(file):
            yield Finding(
                level="warning",
                subject="shared memory",
                message=f"{file} holds {gibibytes(file.stat().st_size)} of a run that is dead",
                fix="the next run removes it; or do so now",
            )


def _snapshots(shared: Path) -> Iterator[Finding]:
    for folder in leftovers(shared):
        size = gibibytes(size_of(folder))
        yield Finding(
            level="warning",
            subject="shared memory",
            message=f"{folder} holds {size}, snapshots of a run whose folder is gone",
            fix="the next run removes it; or do so now",
        )


def _ray_processes() -> list[Finding]:
    processes = psutil.process_iter(["name", "ppid", "pid"])
    return list(ray_without_driver(process.info for process in processes))


def ray_without_driver(processes: Iterable[dict[str, Any]]) -> Iterator[Finding]:
    """Yield Ray clusters whose driver is gone.

    Args:
        processes: `name`, `ppid` and `pid` of each.
    """
    for process in processes:
        if process["name"] in _RAY_PROCESSES and process["ppid"] == 1:
            yield Finding(
                level="warning",
                subject="ray",
                message=f"{process['name']} (pid {process['pid']}) has no driver: a "
                "cluster that was started by hand, or one whose driver was killed",
                fix="`ray stop` ends all clusters of this machine, if it is not yours to keep",
            )
