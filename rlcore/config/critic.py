"""Section `critic`: the value model of PPO. Most keys follow the actor's where they are null."""

from pydantic import Field

from rlcore.config.actor import LossAggMode, OptimConfig
from rlcore.config.base import (
    Epochs,
    Factor,
    PathText,
    Prompts,
    Section,
    Seed,
    Tokens,
    Trajectories,
)


class CriticOptimConfig(OptimConfig):
    """AdamW of the critic."""

    lr: Factor = Field(default=1e-5, gt=0)
    """Learning rate after warm-up."""


class CriticModelConfig(Section):
    """The model that the critic starts from."""

    path: PathText | None = None
    """Folder in Hugging Face format; null: the policy's (verl: a model of its own)."""
    trust_remote_code: bool = False
    """Run Python code that lies in the model folder."""


class CriticConfig(Section):
    """The value model and its update."""

    enable: bool | None = None
    """Train a critic; null: with `adv_estimator=gae`."""
    model: CriticModelConfig = Field(default_factory=CriticModelConfig)
    """The model that the critic starts from."""
    optim: CriticOptimConfig = Field(default_factory=CriticOptimConfig)
    """Optimizer."""
    ppo_mini_batch_size: Prompts | None = Field(default=None, ge=1)
    """Prompts per optimizer step; null: the actor's."""
    ppo_micro_batch_size_per_gpu: Trajectories | None = Field(default=None, ge=1)
    """Trajectories per forward and backward pass; null: the actor's."""
    use_dynamic_bsz: bool | None = None
    """Cut mini-batches by tokens; null: as the actor."""
    ppo_max_token_len_per_gpu: Tokens = Field(default=32768, ge=1)
    """Tokens per forward and backward pass with `use_dynamic_bsz`."""
    forward_max_token_len_per_gpu: Tokens | None = Field(default=None, ge=1)
    """Tokens per forward pass alone; null: `ppo_max_token_len_per_gpu`."""
    forward_micro_batch_size_per_gpu: Trajectories | None = Field(default=None, ge=1)
    """Trajectories per forward pass alone; null: `ppo_micro_batch_size_per_gpu`."""
    ppo_epochs: Epochs | None = Field(default=None, ge=1)
    """Passes over the batch; null: as the actor."""
    shuffle: bool | None = None
    """Shuffle prompts before cutting mini-batches; null: as the actor."""
    data_loader_seed: Seed = Field(default=42, ge=0)
    """Seed of that shuffle."""
    cliprange_value: Factor | None = Field(default=0.5, gt=0)
    """A value may move this far from the old one before its loss is clipped; null: no clip."""
    loss_agg_mode: LossAggMode | None = None
    """How token losses become one number; null: as the actor."""
    grad_clip: Factor = Field(default=1.0, gt=0)
    """The gradient's norm is cut to this."""
