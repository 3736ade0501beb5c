"""Sections `actor_rollout_ref.model` and `.actor`: the weights that are trained, and how."""

from typing import Any, Literal, cast

from pydantic import Field, model_validator

from rlcore.config.base import Float, Int, PathText, Section

LossAggMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


class ModelConfig(Section):
    """The model that is trained."""

    path: PathText
    """Folder in Hugging Face format: weights, config.json, tokenizer with chat template."""
    trust_remote_code: bool = False
    """Run Python code that lies in the model folder."""


class OptimConfig(Section):
    """AdamW and its learning-rate schedule, which moves once per inner step."""

    lr: Float = Field(default=1e-6, gt=0)
    """Learning rate after warm-up."""
    betas: tuple[Float, Float] = (0.9, 0.999)
    """AdamW's decay rates of the two moments."""
    weight_decay: Float = Field(default=0.01, ge=0)
    """AdamW's decoupled weight decay."""
    lr_warmup_steps: Int = Field(default=-1, ge=-1)
    """Steps of linear warm-up; -1: by `lr_warmup_steps_ratio`."""
    lr_warmup_steps_ratio: Float = Field(default=0.0, ge=0, le=1)
    """Warm-up as a share of all steps."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """What the learning rate does after warm-up; cosine falls to 0."""


class PolicyLossConfig(Section):
    """Which policy loss."""

    loss_mode: Literal["vanilla"] = "vanilla"
    """`vanilla`: PPO's clipped ratio with a dual clip."""


class ActorConfig(Section):
    """The policy update."""

    ppo_mini_batch_size: Int = Field(default=256, ge=1)
    """Prompts per optimizer step (times `rollout.n` trajectories)."""
    ppo_micro_batch_size_per_gpu: Int | None = Field(default=None, ge=1)
    """Trajectories per forward and backward pass; has no effect with `use_dynamic_bsz`."""
    use_dynamic_bsz: bool = False
    """Cut mini-batches by tokens (`ppo_max_token_len_per_gpu`) instead of trajectories."""
    ppo_max_token_len_per_gpu: Int = Field(default=16384, ge=1)
    """Tokens per forward and backward pass with `use_dynamic_bsz`."""
    clip_ratio: Float = Field(default=0.2, ge=0)
    """Clip of the ratio on both sides, where `clip_ratio_low` or `_high` says nothing else."""
    clip_ratio_low: Float = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped at 1 - this; not set: `clip_ratio` (verl: always 0.2)."""
    clip_ratio_high: Float = Field(default=0.2, ge=0)
    """The ratio is clipped at 1 + this; not set: `clip_ratio` (verl: always 0.2)."""
    clip_ratio_c: Float = Field(default=3.0, gt=1)
    """Dual clip: the loss of a negative advantage is at most this times its size."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one number."""
    loss_scale_factor: Float | None = Field(default=None, gt=0)
    """Divisor of `seq-mean-token-sum-norm`; null: `data.max_response_length`."""
    policy_loss: PolicyLossConfig = Field(default_factory=PolicyLossConfig)
    """Which policy loss."""
    entropy_coeff: Float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    ppo_epochs: Int = Field(default=1, ge=1)
    """Passes over the batch of an inner step."""
    shuffle: bool = False
    """Shuffle prompts before cutting mini-batches."""
    data_loader_seed: Int = Field(default=42, ge=0)
    """Seed of that shuffle."""
    grad_clip: Float = Field(default=1.0, gt=0)
    """The gradient's norm is cut to this."""
    optim: OptimConfig = Field(default_factory=OptimConfig)
    """Optimizer."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the matrix products (autocast); weights and optimizer state are float32."""

    @model_validator(mode="before")
    @classmethod
    def _clip_ratio_fills_low_and_high(cls, values: Any) -> Any:
        # In verl a lone clip_ratio has no effect, since low and high have defaults of their own.
        if not isinstance(values, dict) or "clip_ratio" not in values:
            return values  # pyright: ignore[reportUnknownVariableType]
        given = cast("dict[str, Any]", values)
        ratio = given["clip_ratio"]
        return {"clip_ratio_low": ratio, "clip_ratio_high": ratio, **given}
