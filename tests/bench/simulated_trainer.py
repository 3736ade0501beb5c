"""A trainer whose phases take a millisecond, for bench_pages.py; loaded by executors, too."""

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rlcore.trainer.base import PPOTrainer, TrainerResources, register_trainer
from rlcore.trainer.phases import Metrics
from rlcore.types import BatchRef

PHASE_S = 0.001


class SimulatedManager:
    """Takes a millisecond, too."""

    def __init__(self) -> None:
        self.replicas: dict[str, Any] = {}

    def exclusive(self) -> AbstractContextManager[None]:
        """Nobody else has it."""
        return nullcontext()

    def drop_lost(self, members: Any, lost: Any) -> None:
        """No replica is lost."""

    def was_called(self, method: str) -> None:
        """No replica joins."""

    def with_key(self, key: Any) -> "SimulatedManager":
        """Return itself."""
        del key
        return self

    def sleep_replicas(self) -> None:
        """Nothing sleeps."""
        time.sleep(PHASE_S)

    def update_weights(self, global_steps: int) -> dict[str, Any]:
        """No weights are published."""
        time.sleep(PHASE_S)
        return {
            "version": global_steps,
            "bytes": 0,
            "seconds": PHASE_S,
            "gb_per_s": 0.0,
            "lost": [],
        }


@register_trainer("simulated")
class SimulatedTrainer(PPOTrainer):
    """Has all phases and hooks of mode `sync`, and no collaborators."""

    def __init__(self, config: Any, resources: TrainerResources) -> None:
        self.config = config
        self.global_steps = 0
        self.state = {"train_position": 0, "scores": {}}
        self.inner_steps = 1
        self.total_steps = resources.total_steps
        self.run_id = resources.folder.run_id
        self.attempt = resources.attempt
        self.folder = resources.folder
        self.checkpoint_manager = resources.checkpoint_manager
        self.call_key = None
        self.deadline_s = 0.0

    def on_sample_end(self) -> None:
        """As mode `sync`."""
        self.checkpoint_manager.sleep_replicas()

    def on_step_end(self) -> None:
        """As mode `sync`."""
        self.checkpoint_manager.update_weights(self.global_steps)

    def _work(self) -> Metrics:
        time.sleep(PHASE_S)
        return {"critic/score/mean": 0.5, "response_length/mean": 8.0}

    def _add_batch_to_generate(self) -> Metrics:
        return self._work()

    def _sample_batch(self) -> tuple[BatchRef, Metrics]:
        batch = BatchRef(
            run_id=self.run_id,
            global_step=self.global_steps,
            inner_step=0,
            lease_id="l",
            num_prompts=1,
            num_trajectories=1,
        )
        return batch, self._work()

    def _compute_reward_colocate(self, batch: BatchRef) -> Metrics:
        del batch
        return self._work()

    def _balance_batch(self, batch: BatchRef) -> Metrics:
        del batch
        return self._work()

    def _compute_old_log_prob(self, batch: BatchRef) -> Metrics:
        del batch
        return self._work()

    def _compute_advantage(self, batch: BatchRef) -> Metrics:
        del batch
        return self._work()

    def _update_actor(self, batch: BatchRef) -> Metrics:
        del batch
        return self._work()

    def _save_snapshot(self) -> Metrics:
        return self._work()

    def _commit_step(self) -> Metrics:
        return self._work()
