"""What a training worker needs to know: plain values, so that it can be sent to any process."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlcore.algorithms.aggregate import AggMode
from rlcore.config import RunConfig
from rlcore.config.actor import ModelConfig
from rlcore.config.arguments import arguments
from rlcore.config.cores import Cores, threads_on
from rlcore.training.batches import MicroBatchLimits
from rlcore.training.distillation import DistillationSpec
from rlcore.training.loss_choice import loss_choice
from rlcore.training.plan import CriticSpec, LoraSpec, OptimizerSpec, UpdatePlan
from rlcore.training.schedule import LearningRate


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSpec:
    """Model, optimizer, loss and limits of one training worker.

    Example:
        >>> spec = TrainingSpec.from_config(config, run_id="r1", attempt=1, folder=folder)
        >>> worker = TrainingWorker(spec)
    """

    run_id: str
    attempt: int
    folder: str
    """Run folder: dumps of non-finite steps and the newest weight version go there."""
    model_path: str
    learning_rate: LearningRate
    trust_remote_code: bool = False
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Autocast type; weights and optimizer state are float32."""
    packing: Literal["shared_prefix", "padded"] = "shared_prefix"
    temperature: float = 1.0
    """Of sampling: log-probs are of the scaled distribution."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    mini_batch_groups: int = 256
    """Groups (prompts) per optimizer step."""
    micro_batch_rows: int | None = None
    """Rows per forward and backward pass; None: by `micro_batch_tokens`."""
    micro_batch_tokens: int = 16384
    ppo_epochs: int = 1
    shuffle: bool = False
    shuffle_seed: int = 42
    loss_mode: str = "vanilla"
    loss_settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the policy loss reads of the configuration, as keyword arguments."""
    has_is_weights: bool = False
    """Whether compute_advantage wrote `rollout_is_weights`."""
    has_train_mask: bool = False
    """Whether compute_advantage wrote `train_mask`."""
    rejections: tuple[Mapping[str, Any], ...] = ()
    """Of bypass mode, where they compare with the weights being trained."""
    off_policy_delta: float | None = None
    """Bound of the off-policy sequence mask."""
    loss_agg_mode: AggMode = "token-mean"
    loss_scale_factor: float | None = None
    entropy_coeff: float = 0.0
    kl_loss: Mapping[str, Any] | None = None
    """Keyword arguments of `kl_estimate`; None: no KL from the reference in the loss."""
    kl_loss_coef: float = 0.001
    has_reference: bool = False
    """Whether log-probs of a frozen model are asked for."""
    reference_path: str | None = None
    """Its folder; None: the model as it was before training."""
    distillation: DistillationSpec | None = None
    lora: LoraSpec | None = None
    critic: CriticSpec | None = None
    gradient_checkpointing: bool = False
    """Compute each layer's activations again in the backward pass instead of keeping them."""
    max_nonfinite_steps: int = 3
    seed: int = 0
    num_threads: int | None = None
    """None: all cores."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where each rank computes."""
    cores: Cores = ()
    """Numbers of the cores that it computes on; empty: all."""
    full_determinism: bool = False

    @property
    def limits(self) -> MicroBatchLimits:
        """Limits of a micro-batch."""
        return MicroBatchLimits(max_rows=self.micro_batch_rows, max_tokens=self.micro_batch_tokens)

    @property
    def optimizer(self) -> OptimizerSpec:
        """The policy's optimizer."""
        return OptimizerSpec(
            betas=self.betas,
            weight_decay=self.weight_decay,
            grad_clip=self.grad_clip,
            limits=self.limits,
        )

    @property
    def plan(self) -> UpdatePlan:
        """How a batch becomes optimizer steps of the policy."""
        return UpdatePlan(
            learning_rate=self.learning_rate,
            mini_batch_groups=self.mini_batch_groups,
            epochs=self.ppo_epochs,
            shuffle=self.shuffle,
            shuffle_seed=self.shuffle_seed,
            max_nonfinite_steps=self.max_nonfinite_steps,
        )

    @classmethod
    def from_config(
        cls,
        config: RunConfig,
        *,
        run_id: str,
        attempt: int,
        folder: str | Path,
        total_steps: int | None = None,
        cores: Cores = (),
    ) -> "TrainingSpec":
        """Take what concerns training out of the run's configuration.

        Args:
            config: The whole of it.
            run_id: Run whose calls the worker admits.
            attempt: Lower ones are refused.
            folder: Run folder.
            total_steps: Inner steps of the run, where the schedule ends; None:
                `trainer.total_training_steps`.
            cores: That it computes on; empty: all.
        """
        model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
        rollout, loss = config.actor_rollout_ref.rollout, loss_choice(config)
        return cls(
            run_id=run_id,
            attempt=attempt,
            folder=str(folder),
            model_path=model.path,
            trust_remote_code=model.trust_remote_code,
            learning_rate=LearningRate.from_config(
                actor.optim, total_steps or config.trainer.total_training_steps
            ),
            dtype=actor.dtype,
            betas=actor.optim.betas,
            weight_decay=actor.optim.weight_decay,
            grad_clip=actor.grad_clip,
            mini_batch_groups=actor.ppo_mini_batch_size,
            micro_batch_rows=None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu,
            micro_batch_tokens=actor.ppo_max_token_len_per_gpu,
            ppo_epochs=actor.ppo_epochs,
            shuffle=actor.shuffle,
            shuffle_seed=actor.data_loader_seed,
            loss_mode=loss.name,
            loss_settings=loss.settings,
            has_is_weights=loss.has_is_weights,
            has_train_mask=loss.has_train_mask,
            rejections=loss.rejections,
            loss_agg_mode=actor.loss_agg_mode,
            entropy_coeff=actor.entropy_coeff,
            kl_loss=arguments(config, "kl_estimate") if actor.use_kl_loss else None,
            kl_loss_coef=actor.kl_loss_coef,
            has_reference=config.needs_reference,
            reference_path=config.actor_rollout_ref.ref.model.path,
            distillation=DistillationSpec.from_config(config),
            lora=lora_of(model),
            critic=_critic(config, total_steps) if config.needs_critic else None,
            gradient_checkpointing=model.enable_gradient_checkpointing,
            max_nonfinite_steps=config.trainer.max_nonfinite_steps,
            seed=config.seed,
            num_threads=max(threads_on(config, cores) // config.num_ranks, 1),
            cores=cores,
            device=config.trainer.device,
            full_determinism=rollout.full_determinism,
            off_policy_delta=arguments(config, "off_policy_sequence_mask")["delta"],
            **arguments(config, "token_logp"),
            **arguments(config, "agg_loss"),
        )


def lora_of(model: ModelConfig) -> LoraSpec | None:
    """Return which adapters the model has; None: it has none."""
    if not model.lora_rank:
        return None
    return LoraSpec(
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        target_modules=model.target_modules,
        exclude_modules=model.exclude_modules,
        merge=model.lora.merge,
    )


def _critic(config: RunConfig, total_steps: int | None) -> CriticSpec:
    """Take the critic's part; what it does not say is as the actor's."""
    critic, actor = config.critic, config.actor_rollout_ref.actor
    rate = LearningRate.from_config(
        critic.optim, total_steps or config.trainer.total_training_steps
    )
    is_by_tokens = config.critic_is_by_tokens
    rows = critic.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu
    forward_rows = critic.forward_micro_batch_size_per_gpu or rows
    tokens = critic.ppo_max_token_len_per_gpu
    loss = arguments(config, "value_loss")
    return CriticSpec(
        model_path=critic.model.path or config.actor_rollout_ref.model.path,
        trust_remote_code=critic.model.trust_remote_code,
        optimizer=OptimizerSpec(
            betas=critic.optim.betas,
            weight_decay=critic.optim.weight_decay,
            grad_clip=critic.grad_clip,
            limits=MicroBatchLimits(max_rows=None if is_by_tokens else rows, max_tokens=tokens),
        ),
        plan=UpdatePlan(
            learning_rate=rate,
            mini_batch_groups=critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
            epochs=critic.ppo_epochs or actor.ppo_epochs,
            shuffle=_first(critic.shuffle, actor.shuffle),
            shuffle_seed=critic.data_loader_seed,
            max_nonfinite_steps=config.trainer.max_nonfinite_steps,
        ),
        forward_limits=MicroBatchLimits(
            max_rows=None if is_by_tokens else forward_rows,
            max_tokens=critic.forward_max_token_len_per_gpu or tokens,
        ),
        loss_agg_mode=loss.pop("agg"),
        loss_settings=loss,
        **arguments(config, "agg_loss"),
    )


def _first(own: bool | None, other: bool) -> bool:
    return other if own is None else own
