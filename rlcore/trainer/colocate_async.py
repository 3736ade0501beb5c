"""Mode `colocate_async`: the trainer's devices generate ahead while they do not train.

    generate (N, N+1, …) | abort, sleep | train N | update, resume | generate on with prefixes …

`num_warmup_batches` batches are on their way beyond the step's own, so that long responses span
steps. A response that is cut off keeps its tokens, log-probs and weight versions on the client's
side and goes on, with the budget that is left, under the new weights.
"""

from rlcore.trainer.base import PPOTrainer, register_trainer


@register_trainer("colocate_async")
class PPOTrainerColocateAsync(PPOTrainer):
    """The replicas share the training devices, and prompts of several steps are on their way."""

    is_async = True

    def on_train_begin(self) -> None:
        """Fill the pipeline, less what a resume restored."""
        self._restore_rows()
        self._warm_up(self.config.trainer.v1.colocate_async.num_warmup_batches)

    def on_sample_end(self) -> None:
        """Cut off what runs, then free the replicas' memory for training."""
        self.checkpoint_manager.abort_replicas()
        self.checkpoint_manager.sleep_replicas()

    def on_step_end(self) -> None:
        """Go on with the step's weights; a request wakes the replica."""
        self.checkpoint_manager.update_weights(self.global_steps)
        self.checkpoint_manager.resume_generation_replicas()
