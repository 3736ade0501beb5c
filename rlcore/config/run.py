"""The whole tree: `RunConfig`, with sections `algorithm` and `reward`."""

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from rlcore.config.actor import ActorConfig, ModelConfig
from rlcore.config.base import Float, Int, PathText, Section
from rlcore.config.data import DataConfig
from rlcore.config.rollout import RolloutConfig
from rlcore.config.rules import CROSS_FIELD, broken_rules
from rlcore.config.trainer import DeadlinesConfig, RayConfig, TrainerConfig


class ActorRolloutRefConfig(Section):
    """The policy: its weights, its training and its generation."""

    model: ModelConfig
    """The model that is trained."""
    actor: ActorConfig = Field(default_factory=ActorConfig)
    """The policy update."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """The generation side."""


class AlgorithmConfig(Section):
    """From rewards to advantages."""

    adv_estimator: Literal["grpo"] = "grpo"
    """Advantage estimator (verl: gae, which needs a critic)."""
    gamma: Float = Field(default=1.0, ge=0, le=1)
    """Discount; grpo has none."""
    lam: Float = Field(default=1.0, ge=0, le=1)
    """Lambda of GAE; grpo has none."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation; false: Dr. GRPO."""
    use_kl_in_reward: Literal[False] = False
    """Subtract a KL penalty from the reward."""


class CustomRewardFunctionConfig(Section):
    """A reward function of the user's."""

    path: PathText | None = None
    """Python file; null: the rule registered for the row's data source."""
    name: str = "compute_score"
    """Function in that file, sync or async."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Passed on to the function."""


class RewardConfig(Section):
    """Scores of responses."""

    custom_reward_function: CustomRewardFunctionConfig = Field(
        default_factory=CustomRewardFunctionConfig
    )
    """A reward function of the user's."""
    max_failure_ratio: Float = Field(default=0.5, ge=0, le=1)
    """A larger share of failed sessions than this ends the run (ours)."""


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
    reward: RewardConfig = Field(default_factory=RewardConfig)
    """Scores of responses."""
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    """The run itself."""
    deadlines: DeadlinesConfig = Field(default_factory=DeadlinesConfig)
    """When a wait is overdue (ours)."""
    ray: RayConfig = Field(default_factory=RayConfig)
    """The Ray cluster (ours)."""
    seed: Int = Field(default=0, ge=0)
    """Seed of everything that has no seed of its own (ours)."""

    @model_validator(mode="after")
    def _keys_fit_together(self) -> "RunConfig":
        problems = broken_rules(self)
        if problems:
            raise PydanticCustomError(
                CROSS_FIELD,
                "{message}",
                {"message": "; ".join(map(str, problems)), "problems": problems},
            )
        return self

    @property
    def num_threads(self) -> int:
        """Threads of tensor maths in each process that computes, given or all cores of this host.

        Said to torch by number: Ray sets OMP_NUM_THREADS=1 for actors that reserve no CPU.
        """
        return self.ray.num_threads or len(os.sched_getaffinity(0))

    @property
    def user_modules(self) -> list[str]:
        """Python files of the user that register things, loaded in every process of a run."""
        backend_module = self.actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module
        return [*self.trainer.user_modules, *([backend_module] if backend_module else [])]

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
