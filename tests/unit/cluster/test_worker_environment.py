"""What a worker process is told before it imports anything of a run."""

import subprocess
import sys

from rlcore.cluster.worker_environment import (
    FOLDER_VARIABLE,
    OBJECTS_BETWEEN_COLLECTIONS,
    begin_worker,
    worker_environment,
)

BEGIN = """
import gc, os
from rlcore.cluster.worker_environment import begin_worker
before = gc.get_threshold()
begin_worker()
print(os.getcwd(), gc.get_threshold() == (%d, *before[1:]), gc.isenabled())
"""


def test_a_worker_goes_to_the_drivers_folder_and_collects_seldom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = worker_environment()
    assert environment["worker_process_setup_hook"] is begin_worker
    variables = environment["env_vars"]
    assert variables[FOLDER_VARIABLE] == str(tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, variables[FOLDER_VARIABLE])
    monkeypatch.chdir("/")
    said = subprocess.run(
        [sys.executable, "-c", BEGIN % OBJECTS_BETWEEN_COLLECTIONS],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout.split() == [str(tmp_path), "True", "True"]
