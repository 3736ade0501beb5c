"""Where processes that compute with torch's threads run, and their environment."""

import os
from collections.abc import Collection

COMPUTE_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""For `runtime_env={"env_vars": ...}`: threads that wait for each other sleep instead of spinning.

On a machine whose cores are shared with other busy processes a spinning thread keeps the one it
waits for from running: an update of SmolLM2 on two busy cores took 5 s asleep and 38-89 s spinning.
"""


def compute_on(cores: Collection[int]) -> None:
    """Keep the calling thread, and those that it starts from now on, on `cores`; empty: on all."""
    if cores:
        os.sched_setaffinity(0, cores)
