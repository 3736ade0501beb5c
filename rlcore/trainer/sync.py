"""Mode `sync`: generate, sleep, train, publish, one after the other. On-policy: staleness 0."""

from rlcore.trainer.base import PPOTrainer, register_trainer


@register_trainer("sync")
class PPOTrainerSync(PPOTrainer):
    """The replicas share the training devices: they sleep while the trainer works."""

    def on_sample_end(self) -> None:
        """Free the replicas' memory for training."""
        self.checkpoint_manager.sleep_replicas()

    def on_step_end(self) -> None:
        """Wake the replicas with the step's weights."""
        self.checkpoint_manager.update_weights(self.global_steps)
