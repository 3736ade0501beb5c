"""The environment of Ray's worker processes: how and where their threads run, and their folder."""

import gc
import os
from collections.abc import Collection
from pathlib import Path

COMPUTE_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""For `runtime_env={"env_vars": ...}`: threads that wait for each other sleep instead of spinning.

On a machine whose cores are shared with other busy processes a spinning thread keeps the one it
waits for from running: an update of SmolLM2 on two busy cores took 5 s asleep and 38-89 s spinning.
"""

OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""Of Python's garbage collector, which begins with 700: importing torch and what stands on it makes
millions of objects, none of them garbage, and looking through them took an eighth of the import
(tests/bench/bench_imports.py)."""

FOLDER_VARIABLE = "ROLLFLOW_FOLDER"


def worker_environment() -> dict[str, object]:
    """Return the runtime environment of a run's worker processes, for `ray.init`."""
    return {
        "env_vars": {**COMPUTE_ENVIRONMENT, FOLDER_VARIABLE: os.getcwd()},
        "worker_process_setup_hook": begin_worker,
    }


def begin_worker() -> None:
    """Prepare a worker process before it imports anything of a run."""
    collect_seldom()
    enter_folder()


def collect_seldom() -> None:
    """Let this process import large packages without looking for garbage all the time."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)


def enter_folder() -> None:
    """Go to the driver's folder, against which a configuration's relative paths are resolved.

    Workers of a cluster that was started by `ray start` begin in the folder where that was typed.
    A host that does not have the driver's folder needs absolute paths.
    """
    folder = Path(os.environ[FOLDER_VARIABLE])
    if folder.is_dir():
        os.chdir(folder)


def compute_on(cores: Collection[int]) -> None:
    """Keep the calling thread, and those that it starts from now on, on `cores`; empty: on all."""
    if cores:
        os.sched_setaffinity(0, cores)
