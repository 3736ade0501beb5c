"""The whole tree: `RunConfig`."""

import os
from pathlib import Path

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlcore.config.actor import ActorConfig, ModelConfig, RefConfig
from rlcore.config.algorithm import AlgorithmConfig
from rlcore.config.base import Section, Seed
from rlcore.config.critic import CriticConfig
from rlcore.config.data import DataConfig
from rlcore.config.distillation import DistillationConfig
from rlcore.config.problems import CROSS_FIELD
from rlcore.config.queue import TransferQueueConfig
from rlcore.config.reward import RewardConfig
from rlcore.config.rollout import RolloutConfig
from rlcore.config.trainer import DeadlinesConfig, RayConfig, TrainerConfig


class ActorRolloutRefConfig(Section):
    """The policy: its weights, its training and its generation."""

    model: ModelConfig
    """The model that is trained."""
    actor: ActorConfig = Field(default_factory=ActorConfig)
    """The policy update."""
    ref: RefConfig = Field(default_factory=RefConfig)
    """The frozen reference."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """The generation side."""


class RunConfig(Section):
    """Everything that a run was asked for; verl's tree, checked.

    Example:
        >>> from rlcore.config import load_config
        >>> config = load_config("grpo-tiny", ["actor_rollout_ref.rollout.n=8"])
        >>> config.actor_rollout_ref.rollout.n
        8
    """

    data: DataConfig
    """Prompts."""
    actor_rollout_ref: ActorRolloutRefConfig
    """The policy."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """From rewards to advantages."""
    critic: CriticConfig = Field(default_factory=CriticConfig)
    """The value model."""
    distillation: DistillationConfig = Field(default_factory=DistillationConfig)
    """A teacher that the policy learns from."""
    reward: RewardConfig = Field(default_factory=RewardConfig)
    """Scores of responses."""
    transfer_queue: TransferQueueConfig = Field(default_factory=TransferQueueConfig)
    """Where trajectories wait."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """The run itself."""
    deadlines: DeadlinesConfig = Field(default_factory=DeadlinesConfig)
    """When a wait is overdue (ours)."""
    ray: RayConfig = Field(default_factory=RayConfig)
    """The Ray cluster (ours)."""
    seed: Seed = Field(default=0, ge=0)
    """Seed of everything that has no seed of its own (ours)."""

    @model_validator(mode="after")
    def _keys_fit_together(self) -> "RunConfig":
        from rlcore.config.rules import broken_rules  # which walk the tree that is defined here

        problems = broken_rules(self)
        if problems:
            raise PydanticCustomError(
                CROSS_FIELD,
                "{message}",
                {"message": "; ".join(map(str, problems)), "problems": problems},
            )
        return self

    @property
    def user_modules(self) -> tuple[str, ...]:
        """Files of the user's that register things, for processes that know torch anyway."""
        backend = self.actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module
        return (*self.trainer.user_modules, *(() if backend is None else (backend,)))

    @property
    def python_files(self) -> tuple[str, ...]:
        """Files of the user's that processes with a copy of the trainer load at their start."""
        sampler = self.trainer.v1.sampler.custom_sampler.path
        return (*self.user_modules, *(() if sampler is None else (sampler,)))

    @property
    def num_threads(self) -> int:
        """Threads of tensor maths in each process that computes, given or all cores of this host.

        Said to torch by number: Ray sets OMP_NUM_THREADS=1 for actors that reserve no CPU.
        """
        return self.ray.num_threads or len(os.sched_getaffinity(0))

    @property
    def num_ranks(self) -> int:
        """Processes of the training worker."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def needs_reference(self) -> bool:
        """Whether a KL from a frozen reference is asked for."""
        return self.algorithm.use_kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss

    @property
    def teacher_path(self) -> str | None:
        """Folder of the teacher; None: nothing is distilled."""
        teacher = self.distillation.teacher_models.teacher_model
        return teacher.model_path if self.distillation.enabled else None

    @property
    def learns_from_rewards(self) -> bool:
        """Whether advantages reach the loss: not where the teacher alone is learnt from."""
        distillation = self.distillation
        return not distillation.enabled or distillation.distillation_loss.use_task_rewards

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained: told, or where the estimator is GAE."""
        enable = self.critic.enable
        return self.algorithm.adv_estimator == "gae" if enable is None else enable

    @property
    def critic_is_by_tokens(self) -> bool:
        """Whether the critic's mini-batches are cut by tokens: told, or as the actor's."""
        own = self.critic.use_dynamic_bsz
        return self.actor_rollout_ref.actor.use_dynamic_bsz if own is None else own

    @property
    def needs_baseline(self) -> bool:
        """Whether one greedy response per prompt is scored beside its sessions."""
        return self.algorithm.adv_estimator == "remax"

    @property
    def scores_later(self) -> bool:
        """Whether batches are scored when complete: the reward model has no devices of its own.

        Agent loop workers leave their sessions unscored then.
        """
        model = self.reward.reward_model
        return model.enable and not model.enable_resource_pool

    @property
    def num_reward_managers(self) -> int:
        """How many reward managers score beside each other; limits of the run are shared by them.

        One per agent loop worker; a single one where batches are scored when complete.
        """
        return 1 if self.scores_later else self.actor_rollout_ref.rollout.agent.num_workers

    @property
    def data_seed(self) -> int:
        """Seed of the order of the prompts."""
        return self.seed if self.data.seed is None else self.data.seed

    @property
    def rollout_seed(self) -> int:
        """Seed of sampling."""
        seed = self.actor_rollout_ref.rollout.seed
        return self.seed if seed is None else seed

    @property
    def num_trajectories(self) -> int:
        """Trajectories per step."""
        return self.data.train_batch_size * self.actor_rollout_ref.rollout.n

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps per step."""
        actor = self.actor_rollout_ref.actor
        return actor.ppo_epochs * (self.data.train_batch_size // actor.ppo_mini_batch_size)

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its response at most."""
        return self.data.max_prompt_length + self.data.max_response_length

    def total_steps(self, num_rows: int) -> int:
        """Return the steps of a run over `num_rows` training prompts."""
        from_epochs = self.trainer.total_epochs * (num_rows // self.data.train_batch_size)
        return self.trainer.total_training_steps or from_epochs

    def run_folder(self, run_id: str) -> Path:
        """Return the folder that holds everything about run `run_id`."""
        local = self.trainer.default_local_dir
        return Path(local) if local else Path(self.trainer.runs_root) / run_id
