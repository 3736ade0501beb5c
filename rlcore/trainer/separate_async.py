"""Mode `separate_async`: replicas with devices of their own never stop but for an update.

    trainer   | sample 1 | train | sample 2 | train | … | update |
    replicas  | generate ================================ pause == generate …

A step has `parameter_sync_step` inner steps of one optimizer step each; weights are published once
per step. The old log-probs of every inner step are those of the weights at the step's start, which
are what the replicas serve.
"""

from rlcore.config import RunConfig
from rlcore.trainer.base import PPOTrainer, register_trainer


@register_trainer("separate_async")
class PPOTrainerSeparateAsync(PPOTrainer):
    """Generation and training do not share devices; sampling pauses nothing."""

    is_async = True
    is_separate = True

    @classmethod
    def inner_steps_of(cls, config: RunConfig) -> int:
        """Return verl's `parameter_sync_step`."""
        return config.trainer.v1.separate_async.parameter_sync_step

    def on_train_begin(self) -> None:
        """Fill the pipeline, less what a resume restored."""
        self._restore_rows()
        self._warm_up(self.config.trainer.v1.separate_async.num_warmup_batches)

    def on_step_end(self) -> None:
        """Publish the step's weights: the only pause of the replicas.

        What runs is cut off and begins anew on the new weights' keys and values, unless
        `in_flight_update` freezes it and lets it go on with the old ones.
        """
        in_flight = self.config.trainer.v1.separate_async.in_flight_update
        if not in_flight:
            self.checkpoint_manager.abort_replicas()
        self.checkpoint_manager.update_weights(self.global_steps)
        if not in_flight:
            self.checkpoint_manager.resume_generation_replicas()
