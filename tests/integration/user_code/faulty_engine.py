"""A back end of weight updates with faults, registered as users register theirs."""

import time
from pathlib import Path

from rlcore.checkpoint_engine.base import CHECKPOINT_ENGINES
from rlcore.checkpoint_engine.naive import NaiveCheckpointEngine
from rlcore.errors import TransientError

HERE = Path(__file__).parent
FAULTY_STEP = 2


@CHECKPOINT_ENGINES.register("faulty")
class FaultyCheckpointEngine(NaiveCheckpointEngine):
    """The first try after one step fails, and no try ends while there is a file `hold_update`."""

    def push(self, key, meta, replicas):
        """Load `meta` in every replica, or do not."""
        if key.global_step == FAULTY_STEP:
            while (HERE / "hold_update").exists():
                (HERE / "update_is_held").touch()
                time.sleep(0.1)
            if key.try_number == 1:
                raise TransientError("the network went away, says the test")
        return super().push(key, meta, replicas)
