"""What a trainer works with: the collaborators that the driver made, and what hooks may call."""

from dataclasses import dataclass
from typing import Any, Protocol

from rlcore.checkpoint_engine.manager import CheckpointEngineManager
from rlcore.cluster.ledger_client import LedgerClient
from rlcore.cluster.reward_model import RewardModel
from rlcore.cluster.training_worker import TrainingGroup
from rlcore.trainer.run_folder import RunFolder


class WeightManager(Protocol):
    """What hooks may call on `checkpoint_manager`; in the flow each call is a Prefect task."""

    def update_weights(self, global_steps: int) -> dict[str, Any]:
        """Publish the trainer's weights to every replica; return bytes, seconds, version."""
        ...

    def sleep_replicas(self) -> None:
        """Free the replicas' memory."""
        ...

    def wake_up_replicas(self) -> None:
        """Serve again with the last committed weights."""
        ...

    def abort_replicas(self) -> None:
        """Stop all running requests; clients keep what was generated."""
        ...

    def resume_generation_replicas(self) -> None:
        """Let replicas that were aborted or paused serve again."""
        ...


@dataclass(kw_only=True, slots=True)
class TrainerResources:
    """The collaborators that the driver made before step 1; all picklable clients."""

    folder: RunFolder
    attempt: int
    ledger: LedgerClient
    training: TrainingGroup
    checkpoint_manager: CheckpointEngineManager
    total_steps: int | None = None
    """Steps of the run; None: not known."""
    reward_model: RewardModel | None = None
    """The one of `reward.reward_model`."""
