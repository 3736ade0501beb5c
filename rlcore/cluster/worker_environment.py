"""The environment of Ray's worker processes: how their threads wait, and where they are."""

import os
from pathlib import Path

COMPUTE_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""For `runtime_env={"env_vars": ...}`: threads that wait for each other sleep instead of spinning.

On a machine whose cores are shared with other busy processes a spinning thread keeps the one it
waits for from running: an update of SmolLM2 on two busy cores took 5 s asleep and 38-89 s spinning.
"""

FOLDER_VARIABLE = "ROLLFLOW_FOLDER"


def worker_environment() -> dict[str, object]:
    """Return the runtime environment of a run's worker processes, for `ray.init`."""
    return {
        "env_vars": {**COMPUTE_ENVIRONMENT, FOLDER_VARIABLE: os.getcwd()},
        "worker_process_setup_hook": enter_folder,
    }


def enter_folder() -> None:
    """Go to the driver's folder, against which a configuration's relative paths are resolved.

    Workers of a cluster that was started by `ray start` begin in the folder where that was typed.
    A host that does not have the driver's folder needs absolute paths.
    """
    folder = Path(os.environ[FOLDER_VARIABLE])
    if folder.is_dir():
        os.chdir(folder)
