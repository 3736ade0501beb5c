"""PPOTrainer: the phases and hooks of a training run, with verl's names.

One object lives in the driver. The loop is in flows/train.py and flows/train_step.py; it calls the
phase methods by way of Prefect tasks (each body on a copy, in an executor) and the hooks in a
thread of the driver, one at a time. A mode is a subclass that fills in hooks (`@register_trainer`).
How prompts are fed is in feeding.py.
"""

import json
from pathlib import Path
from typing import Any, ClassVar

from rlcore.buffer.replay_buffer import ReplayBuffer
from rlcore.buffer.transfer_queue import attached_queue
from rlcore.config import RunConfig
from rlcore.errors import ConfigError
from rlcore.registry import Registry
from rlcore.tracking.batch_metrics import batch_metrics
from rlcore.tracking.engine_gap import watch_engine
from rlcore.tracking.off_policy import off_policy_metrics
from rlcore.trainer.advantage import (
    AdvantageSpec,
    compute_advantage,
    copy_rollout_log_probs,
)
from rlcore.trainer.checkpoint import CheckpointStore, best_step
from rlcore.trainer.dumps import dump_batch
from rlcore.trainer.feeding import PromptFeeding
from rlcore.trainer.late_rewards import LateScorer, with_stored_rewards
from rlcore.trainer.phases import Metrics
from rlcore.trainer.prompt_source import PromptSource
from rlcore.trainer.reference_critic import ReferenceAndCritic, kl_penalty, move_kl_weight
from rlcore.trainer.resources import TrainerResources, WeightManager
from rlcore.trainer.snapshots import SnapshotStore
from rlcore.trainer.supply import make_replay_buffer, num_to_feed
from rlcore.trainer.validation import run_validation
from rlcore.trainer.waiting_rows import save_waiting_rows
from rlcore.types import BatchRef, CallKey, SampledBatch

TRAINERS: Registry[type["PPOTrainer"]] = Registry("trainer mode")
LOOP_METHODS = ("fit", "step", "_step_once")


def register_trainer(name: str) -> Any:
    """Register a trainer mode under `name` (verl's decorator).

    Raises:
        ConfigError: the class overrides `fit`, `step` or `_step_once`: the loop is the flow's.
    """

    def add(cls: type["PPOTrainer"]) -> type["PPOTrainer"]:
        overridden = [method for method in LOOP_METHODS if hasattr(cls, method)]
        if overridden:
            raise ConfigError(
                f"trainer mode {name!r} ({cls.__module__}.{cls.__qualname__}) overrides "
                f"{', '.join(overridden)}; the loop belongs to flows/train.py, where each phase is "
                "a Prefect task: override hooks (on_step_end, ...) or phases (_update_actor, ...)"
            )
        return TRAINERS.register(name)(cls)

    return add


class PPOTrainer(PromptFeeding, ReferenceAndCritic):
    """Base of all modes.

    Attributes:
        config: The frozen configuration.
        global_steps: The step that runs, from 1; 0 before the first.
        state: A dict of JSON values: what a phase may change; it is in every checkpoint.
        checkpoint_manager: Publishes weights and controls the replicas (`WeightManager`).
        replay_buffer: Leases batches of finished prompts.
    """

    is_async: ClassVar[bool] = False
    """Prompts of several steps are on their way: stale groups matter, evicted ones are replaced at
    once, and waiting rows are in checkpoints. A mode's capabilities are class attributes; nothing
    is guessed from its name."""
    is_separate: ClassVar[bool] = False
    """Trains and generates at the same time: on a CPU each side has cores of its own."""
    inner_steps: int = 1
    """Inner steps per step (verl: parameter_sync_step); see `inner_steps_of`."""

    def __init__(self, config: RunConfig, resources: TrainerResources) -> None:
        self.config = config
        self.global_steps = 0
        self.state: dict[str, Any] = {"train_position": 0, "scores": {}}
        self.inner_steps = type(self).inner_steps_of(config)
        self.total_steps = resources.total_steps
        self.run_id = resources.folder.run_id
        self.attempt = resources.attempt
        self.folder = resources.folder
        self.ledger = resources.ledger
        self.training = resources.training
        self.reward_model = resources.reward_model
        self.checkpoint_manager: WeightManager = resources.checkpoint_manager
        self.prompts = PromptSource(config, self.run_id)
        self.replay_buffer: ReplayBuffer = make_replay_buffer(
            config, self.ledger, run_id=self.run_id, attempt=self.attempt
        )
        self.call_key: CallKey | None = None
        self.deadline_s = 0.0

    @classmethod
    def inner_steps_of(cls, config: RunConfig) -> int:
        """Return the inner steps per step; the learning-rate schedule is that many times longer."""
        return cls.inner_steps

    # Hooks, in the order of a run. They run in the driver, in a thread of their own.
    def on_init_end(self) -> None:
        """Publish the weights that were loaded or restored."""
        self.checkpoint_manager.update_weights(self.global_steps)

    def on_train_begin(self) -> None:
        """Before the first step."""

    def on_step_begin(self) -> None:
        """`global_steps` is the step that begins."""

    def on_sample_begin(self) -> None:
        """Before the batch of an inner step is waited for."""

    def on_sample_end(self) -> None:
        """The batch is leased."""

    def on_step_end(self) -> None:
        """The step is committed and saved."""

    def on_validate_begin(self) -> None:
        """Before a validation."""

    def on_validate_end(self) -> None:
        """After a validation."""

    def on_train_end(self) -> None:
        """After the last step, on every normal path."""

    # Phases. Each runs on a copy of this object in an executor and may change only self.state.
    def _add_batch_to_generate(self) -> Metrics:
        """Feed the step's prompts to the ledger; feeding them again changes nothing."""
        count = self.config.data.train_batch_size
        if self.is_async:
            counts = self.ledger.counts(self._partition("train"))
            count = num_to_feed(
                self.config,
                counts,
                steps_left=self._steps_left(self.global_steps),
                fed_already=counts["fed"] - self.state["train_position"],
                policy=self._policy(),
            )
        self.state["fed_before_step"] = self.state["train_position"]
        fed = self._feed(count)
        return {"training/prompts_fed": float(fed)}

    def _sample_batch(self) -> tuple[BatchRef, Metrics]:
        """Wait for the inner step's batch and lease it; asking again returns the same one."""
        batch_size = self.config.data.train_batch_size // self.inner_steps
        versions = self._versions_of_step()
        buffer = self.replay_buffer
        buffer.policy = self._policy(*versions)
        buffer.load_state_dict(self.state.get("replay_buffer", {}))
        batch, metrics = buffer.draw(
            self._key(), "train", batch_size, deadline_s=self.deadline_s, refill_fn=self._refill
        )
        self.state["replay_buffer"] = buffer.state_dict()
        self.state["train_position"] = self._fed_position()
        metrics = {**metrics, **off_policy_metrics(batch, *versions)}
        ref = BatchRef(
            run_id=self.run_id,
            global_step=batch.global_step,
            inner_step=batch.inner_step,
            lease_id=batch.lease_id,
            num_prompts=len(batch.uids),
            num_trajectories=len(batch.keys),
        )
        return ref, metrics

    def _versions_of_step(self) -> tuple[int, tuple[int, ...]]:
        """Return the version of the step's first weights, and the numbers that name none.

        Between two inner steps the trainer has weights that nobody publishes; how old a token is
        counts from those that the step began with.
        """
        training = self.training.state()
        if self._key().inner_step == 0:
            self.state["first_version"] = training["weight_version"]
        return self.state["first_version"], tuple(training["skipped_versions"])

    def _compute_reward_colocate(self, batch: BatchRef) -> Metrics:
        """Report the rewards, which the AgentLoopWorkers computed while they streamed in.

        A reward model without devices of its own computes them now, while the replicas sleep.

        Raises:
            DataError: a trajectory of the batch has no reward.
            RewardError: the reward model's answer to a response is none; names its row.
        """
        leased = self._leased(batch)
        scorer = self._late_scorer()
        if scorer is not None:
            leased = scorer.score_batch(self._partition("train"), leased)
        metrics = batch_metrics(leased)
        if self.config.trainer.rollout_data_dir is not None:
            queue = attached_queue(self.config.deadlines.queue)
            folder = self.config.trainer.rollout_data_dir
            dump_batch(folder, queue, self._partition("train"), leased, self.prompts)
        self.state["sampler"] = self.prompts.observe(self.state.get("sampler"), leased)
        return metrics

    def _balance_batch(self, batch: BatchRef) -> Metrics:
        """Report the sequence lengths that each rank will work on."""
        return self.training.balance_metrics(self._leased(batch))

    def _compute_old_log_prob(self, batch: BatchRef) -> Metrics:
        """Write `old_log_probs` under the step's first weights; in bypass mode the engine's."""
        if self.config.algorithm.rollout_correction.bypass_mode:
            queue = attached_queue(self.config.deadlines.queue)
            return copy_rollout_log_probs(queue, self._partition("train"), self._leased(batch))
        metrics = self.training.with_deadline(self.deadline_s).compute_log_prob(
            self._key(),
            self._partition("train"),
            self._leased(batch),
            keeps_start=self.inner_steps > 1,
        )
        return watch_engine(self.config, metrics)

    def _compute_advantage(self, batch: BatchRef) -> Metrics:
        """Write `advantages`, `returns` and what corrects them, by `algorithm`."""
        queue, partition_id = (
            attached_queue(self.config.deadlines.queue),
            self._partition("train"),
        )
        leased = with_stored_rewards(queue, partition_id, self._leased(batch))
        metrics = compute_advantage(
            queue,
            partition_id,
            leased,
            AdvantageSpec.from_config(self.config),
            kl=kl_penalty(self.config, self.state),
        )
        move_kl_weight(self.config, self.state, self._key(), metrics, len(leased.keys))
        return metrics

    def _update_actor(self, batch: BatchRef) -> Metrics:
        """Make the inner step's optimizer steps; each is applied once, however often this runs.

        While the critic warms up alone there are none.
        """
        if self.is_warming_up:
            return {}
        return self.training.with_deadline(self.deadline_s).update_actor(
            self._key(), self._partition("train"), self._leased(batch)
        )

    def _commit_step(self) -> Metrics:
        """Mark the step's prompts trained and release their lease and rows."""
        key = self._key()
        rows = self.ledger.mark_trained(key, self.global_steps)
        attached_queue(self.config.deadlines.queue).clear(self._partition("train"), rows)
        return {}

    def _save_snapshot(self) -> Metrics:
        """Write snapshot `global_steps` to shared memory, as if the step were committed."""
        self._save_to(SnapshotStore(self.folder))
        return {}

    def _save_checkpoint(self) -> Metrics:
        """Write checkpoint `global_steps` and delete the ones that may go."""
        store = CheckpointStore(self.folder)
        self._save_to(store)
        store.rotate(
            self.config.trainer.max_actor_ckpt_to_keep,
            best_step=best_step(self.state["scores"], among=store.steps()),
        )
        return {}

    def _save_to(self, store: CheckpointStore) -> None:
        key = self._key()
        training = self.training.with_deadline(self.deadline_s)

        def write(path: Path) -> None:
            if self.is_async:
                queue = attached_queue(self.config.deadlines.queue)
                save_waiting_rows(self.ledger, queue, self._partition("train"), path.parent)
            training.save_checkpoint(key, path)

        store.save(
            global_step=self.global_steps,
            attempt=self.attempt,
            trainer={
                "state": {**self.state, "data_digest": self.prompts.digest},
                "ledger": self.ledger.state_dict(released_step=self.global_steps),
            },
            write_actor=write,
        )

    def _validate(self) -> Metrics:
        """Generate for the held-out prompts, score them and write the generations."""
        metrics = run_validation(
            prompts=self.prompts,
            ledger=self.ledger,
            queue=attached_queue(self.config.deadlines.queue),
            key=self._key(),
            partition_id=self._partition("val"),
            folder=self.folder.path,
            deadline_s=self.deadline_s,
            scorer=self._late_scorer(),
            data_dir=self.config.trainer.validation_data_dir,
        )
        self.state["scores"][str(self.global_steps)] = metrics["val-aux/accuracy"]
        return metrics

    # What phases share.
    def _late_scorer(self) -> LateScorer | None:
        """Return what scores complete batches; None where they are scored already."""
        if self.reward_model is None or not self.config.scores_later:
            return None
        queue = attached_queue(self.config.deadlines.queue)
        return LateScorer(self.config, self.prompts, queue, self.reward_model, self._key())

    def _leased(self, batch: BatchRef) -> SampledBatch:
        return self.ledger.leased(batch.lease_id)

    def restore(self, content: dict[str, Any]) -> None:
        """Take over what `trainer.json` of a checkpoint holds (weights are the worker's)."""
        self.global_steps = content["global_step"]
        self.state = json.loads(json.dumps(content["state"]))
        self.prompts.tell_changes(self.state.get("data_digest"))
