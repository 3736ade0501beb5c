"""Sections `actor_rollout_ref.model`, `.actor` and `.ref`: weights, and how they are trained."""

from typing import Annotated, Any, Final, Literal, cast

from pydantic import Field, model_validator

from rlcore.config.base import (
    Epochs,
    Factor,
    Float,
    LogProb,
    PathText,
    Prompts,
    Rank,
    Section,
    Seed,
    Share,
    Steps,
    Tokens,
    Trajectories,
    Unit,
    Words,
    falls_back,
)
from rlcore.config.pending import ADAPTER_PATH

LossAggMode = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]
SEQUENCE_LOSSES: Final = ("gspo", "sapo")
"""Names of the losses whose papers average per sequence."""
SEQUENCE_AGG: Final[LossAggMode] = "seq-mean-token-mean"
KLKind = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "k3+"]


class LoraConfig(Section):
    """What becomes of the LoRA adapters."""

    merge: bool = True
    """Replicas get the weights with the adapters in them (verl: false); false: the adapters alone,
    which each replica of the engine `transformers` adds to the weights of the model folder."""


class ModelConfig(Section):
    """The model that is trained."""

    path: PathText
    """Folder in Hugging Face format: weights, config.json, tokenizer with chat template."""
    trust_remote_code: bool = False
    """Run Python code that lies in the model folder."""
    enable_gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them (verl: true)."""
    lora_rank: Rank = Field(default=0, ge=0)
    """Rank of the LoRA adapters; 0: all weights are trained."""
    lora_alpha: Factor = Field(default=16, gt=0)
    """LoRA's scale, divided by the rank."""
    target_modules: Words = ("all-linear",)
    """Modules that get an adapter; `all-linear`: every linear layer but the head."""
    exclude_modules: Words | None = None
    """Modules that get none."""
    lora: LoraConfig = Field(default_factory=LoraConfig)
    """How adapters reach the replicas."""
    lora_adapter_path: Annotated[PathText | None, ADAPTER_PATH] = None
    """Folder of an adapter to go on from."""


class OptimConfig(Section):
    """AdamW and its learning-rate schedule, which moves once per inner step."""

    lr: Annotated[Float, Unit("per optimizer step")] = Field(default=1e-6, gt=0)
    """Learning rate after warm-up."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW's decay rates of the two moments."""
    weight_decay: Factor = Field(default=0.01, ge=0)
    """AdamW's decoupled weight decay."""
    lr_warmup_steps: Steps = Field(default=-1, ge=-1)
    """Steps of linear warm-up; -1: by `lr_warmup_steps_ratio`."""
    lr_warmup_steps_ratio: Share = Field(default=0.0, ge=0, le=1)
    """Warm-up as a share of all steps."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """What the learning rate does after warm-up; cosine falls to 0."""


class PolicyLossConfig(Section):
    """Which policy loss."""

    loss_mode: str = "vanilla"
    """`vanilla`: PPO's clipped ratio with a dual clip; others by name, or one of your own."""
    decoupled_cap: Factor | None = Field(default=None, gt=0)
    """Largest weight of `decoupled_ppo`; null: none (ours)."""
    decoupled_cap_mode: Literal["truncate", "mask"] = "truncate"
    """A larger weight becomes `decoupled_cap`, or 0 (ours)."""
    off_policy_delta: LogProb | None = Field(default=None, gt=0)
    """Drop negative advantages of rows with a mean old - new log-prob above; null: keep (ours)."""


class ActorConfig(Section):
    """The policy update."""

    ppo_mini_batch_size: Prompts = Field(default=256, ge=1)
    """Prompts per optimizer step (times `rollout.n` trajectories)."""
    ppo_micro_batch_size_per_gpu: Trajectories | None = Field(default=None, ge=1)
    """Trajectories per forward and backward pass; has no effect with `use_dynamic_bsz`."""
    use_dynamic_bsz: bool = False
    """Cut mini-batches by tokens (`ppo_max_token_len_per_gpu`) instead of trajectories."""
    ppo_max_token_len_per_gpu: Tokens = Field(default=16384, ge=1)
    """Tokens per forward and backward pass with `use_dynamic_bsz`."""
    clip_ratio: Factor = Field(default=0.2, ge=0)
    """Clip of the ratio on both sides, where `clip_ratio_low` or `_high` says nothing else."""
    clip_ratio_low: Factor = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped at 1 - this; not set: `clip_ratio` (verl: always 0.2)."""
    clip_ratio_high: Factor = Field(default=0.2, ge=0)
    """The ratio is clipped at 1 + this; not set: `clip_ratio` (verl: always 0.2)."""
    clip_ratio_c: Factor = Field(default=3.0, gt=1)
    """Dual clip: the loss of a negative advantage is at most this times its size."""
    tau_pos: Factor = Field(default=1.0, gt=0)
    """SAPO's temperature of trajectories with a positive advantage."""
    tau_neg: Factor = Field(default=1.05, gt=0)
    """SAPO's temperature of the others."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How token losses become one number; not set: what the loss's paper takes."""
    loss_scale_factor: Annotated[Float, Unit("tokens")] | None = Field(default=None, gt=0)
    """Divisor of `seq-mean-token-sum-norm`; null: `data.max_response_length`."""
    policy_loss: PolicyLossConfig = Field(default_factory=PolicyLossConfig)
    """Which policy loss."""
    entropy_coeff: Factor = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    use_kl_loss: bool = False
    """Add the KL divergence from the reference to the loss."""
    kl_loss_coef: Factor = Field(default=0.001, ge=0)
    """Weight of that KL."""
    kl_loss_type: KLKind = "low_var_kl"
    """Estimator of that KL."""
    kl_loss_value_clamp: LogProb | None = Field(default=10.0, gt=0)
    """Largest value of `low_var_kl` and `k3` per token, no gradient beyond; null: none (ours)."""
    ppo_epochs: Epochs = Field(default=1, ge=1)
    """Passes over the batch of an inner step."""
    shuffle: bool = False
    """Shuffle prompts before cutting mini-batches."""
    data_loader_seed: Seed = Field(default=42, ge=0)
    """Seed of that shuffle."""
    grad_clip: Factor = Field(default=1.0, gt=0)
    """The gradient's norm is cut to this."""
    optim: OptimConfig = Field(default_factory=OptimConfig)
    """Optimizer."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the matrix products (autocast); weights and optimizer state are float32 (ours)."""

    @model_validator(mode="before")
    @classmethod
    def _clip_ratio_fills_low_and_high(cls, values: Any) -> Any:
        # In verl a lone clip_ratio has no effect, since low and high have defaults of their own.
        return falls_back(values, "clip_ratio", "clip_ratio_low", "clip_ratio_high")

    @model_validator(mode="before")
    @classmethod
    def _loss_chooses_its_aggregation(cls, values: Any) -> Any:
        # In verl gspo is aggregated like PPO unless one says otherwise.
        if not isinstance(values, dict) or "loss_agg_mode" in values:
            return values  # pyright: ignore[reportUnknownVariableType]
        given = cast("dict[str, Any]", values)
        loss = given.get("policy_loss")
        raw = cast("dict[str, Any]", loss) if isinstance(loss, dict) else {}
        is_sequence = raw.get("loss_mode") in SEQUENCE_LOSSES
        return {**given, "loss_agg_mode": SEQUENCE_AGG} if is_sequence else given


class RefModelConfig(Section):
    """Which model the reference is."""

    path: PathText | None = None
    """Folder of the reference; null: the model as it was before training."""


class RefConfig(Section):
    """The frozen reference of KL penalties."""

    model: RefModelConfig = Field(default_factory=RefModelConfig)
    """Which model the reference is."""
