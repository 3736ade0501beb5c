"""Rules between keys: each returns the problems it finds, with the sums shown."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rlcore.config.problems import Problem

if TYPE_CHECKING:
    from rlcore.config.run import RunConfig

CROSS_FIELD = "cross_field"
"""Type of the pydantic error that carries the problems found here."""


_MINI_BATCH = (
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.use_dynamic_bsz",
    "actor_rollout_ref.rollout.n",
)


def batch_is_whole_mini_batches(config: "RunConfig") -> Iterator[Problem]:
    """`data.train_batch_size` is a multiple of `ppo_mini_batch_size`."""
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if batch % mini:
        fix = f"set ppo_mini_batch_size to a divisor of {batch}"
        if batch > mini:
            fix += f", or data.train_batch_size to {batch - batch % mini}"
        yield Problem(
            path="actor_rollout_ref.actor.ppo_mini_batch_size",
            value=mini,
            reason=(
                "the step's prompts must be whole mini-batches: data.train_batch_size "
                f"{batch} = {batch // mini} x ppo_mini_batch_size {mini} + {batch % mini}"
            ),
            fix=fix,
            involves=("data.train_batch_size",),
        )


def mini_batch_is_whole_micro_batches(config: "RunConfig") -> Iterator[Problem]:
    """A mini-batch's trajectories are a multiple of `ppo_micro_batch_size_per_gpu`."""
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    micro, rows = actor.ppo_micro_batch_size_per_gpu, actor.ppo_mini_batch_size * n
    path = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    if actor.use_dynamic_bsz:
        return
    if micro is None:
        yield Problem(
            path=path,
            reason="nothing says how mini-batches are cut to fit into memory",
            fix=f"set it to a divisor of {rows} trajectories, or actor.use_dynamic_bsz=true",
            involves=_MINI_BATCH,
        )
    elif rows % micro:
        yield Problem(
            path=path,
            value=micro,
            reason=(
                "a mini-batch must be whole micro-batches: ppo_mini_batch_size "
                f"{actor.ppo_mini_batch_size} x rollout.n {n} = {rows} trajectories = "
                f"{rows // micro} x {micro} + {rows % micro}"
            ),
            fix=f"set it to a divisor of {rows}, or actor.use_dynamic_bsz=true",
            involves=_MINI_BATCH,
        )


def micro_batch_budget_fits_one_trajectory(config: "RunConfig") -> Iterator[Problem]:
    """With `use_dynamic_bsz` the token budget holds the longest trajectory."""
    actor, longest = config.actor_rollout_ref.actor, config.max_model_len
    if actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu < longest:
        yield Problem(
            path="actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
            value=actor.ppo_max_token_len_per_gpu,
            reason=(
                "the longest trajectory does not fit: data.max_prompt_length "
                f"{config.data.max_prompt_length} + max_response_length "
                f"{config.data.max_response_length} = {longest} tokens"
            ),
            fix=f"set it to {longest} or more",
            involves=(
                "data.max_prompt_length",
                "data.max_response_length",
                "actor_rollout_ref.actor.use_dynamic_bsz",
            ),
        )


def group_has_two_sessions(config: "RunConfig") -> Iterator[Problem]:
    """GRPO compares the sessions of a group."""
    n = config.actor_rollout_ref.rollout.n
    if config.algorithm.adv_estimator == "grpo" and n < 2 and not config.trainer.val_only:
        yield Problem(
            path="actor_rollout_ref.rollout.n",
            value=n,
            reason="grpo compares the sessions of one prompt with each other and needs at least 2",
            fix="set it to 8, for instance",
            involves=("algorithm.adv_estimator", "trainer.val_only"),
        )


def grpo_does_not_discount(config: "RunConfig") -> Iterator[Problem]:
    """`gamma` and `lam` have no effect on outcome advantages."""
    for key, value in (("gamma", config.algorithm.gamma), ("lam", config.algorithm.lam)):
        if config.algorithm.adv_estimator == "grpo" and value != 1:
            yield Problem(
                path=f"algorithm.{key}",
                value=value,
                reason="it has no effect with algorithm.adv_estimator=grpo",
                fix="leave it out",
                involves=("algorithm.adv_estimator",),
            )


def scale_factor_needs_its_mode(config: "RunConfig") -> Iterator[Problem]:
    """`loss_scale_factor` divides in one aggregation mode only."""
    actor = config.actor_rollout_ref.actor
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield Problem(
            path="actor_rollout_ref.actor.loss_scale_factor",
            value=actor.loss_scale_factor,
            reason=f"it has no effect with loss_agg_mode={actor.loss_agg_mode}",
            fix="leave it out, or set loss_agg_mode=seq-mean-token-sum-norm",
            involves=("actor_rollout_ref.actor.loss_agg_mode",),
        )


def warm_up_is_given_once(config: "RunConfig") -> Iterator[Problem]:
    """Warm-up is a number of steps or a share, not both."""
    optim = config.actor_rollout_ref.actor.optim
    if optim.lr_warmup_steps >= 0 and optim.lr_warmup_steps_ratio > 0:
        yield Problem(
            path="actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",
            value=optim.lr_warmup_steps_ratio,
            reason=f"it contradicts lr_warmup_steps={optim.lr_warmup_steps}",
            fix="give one of the two",
            involves=("actor_rollout_ref.actor.optim.lr_warmup_steps",),
        )


def validation_sampling_fits(config: "RunConfig") -> Iterator[Problem]:
    """`val_kwargs.do_sample`, `temperature` and `n` ask for the same thing."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    path = "actor_rollout_ref.rollout.val_kwargs"
    if val.do_sample and val.temperature == 0:
        yield Problem(
            path=f"{path}.temperature",
            value=val.temperature,
            reason=f"{path}.do_sample=true needs a temperature above 0",
            fix="set it to 1.0, or do_sample=false",
            involves=(f"{path}.do_sample",),
        )
    if not val.do_sample and val.temperature > 0:
        yield Problem(
            path=f"{path}.temperature",
            value=val.temperature,
            reason=f"it has no effect with {path}.do_sample=false",
            fix="leave it out, or set do_sample=true",
            involves=(f"{path}.do_sample",),
        )
    if not val.do_sample and val.n > 1:
        yield Problem(
            path=f"{path}.n",
            value=val.n,
            reason=f"{path}.do_sample=false gives {val.n} times the same response",
            fix="set it to 1, or do_sample=true with a temperature",
            involves=(f"{path}.do_sample",),
        )


def resume_path_needs_its_mode(config: "RunConfig") -> Iterator[Problem]:
    """`resume_from_path` and `resume_mode=resume_path` go together."""
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        yield Problem(
            path="trainer.resume_from_path",
            reason="trainer.resume_mode=resume_path needs it",
            fix="set it to a checkpoint folder",
            involves=("trainer.resume_mode",),
            has_value=False,
        )
    if trainer.resume_mode != "resume_path" and trainer.resume_from_path is not None:
        yield Problem(
            path="trainer.resume_from_path",
            value=trainer.resume_from_path,
            reason=f"it has no effect with trainer.resume_mode={trainer.resume_mode}",
            fix="leave it out, or set trainer.resume_mode=resume_path",
            involves=("trainer.resume_mode",),
        )


def validation_only_validates(config: "RunConfig") -> Iterator[Problem]:
    """`val_only` happens in the validation before training."""
    if config.trainer.val_only and not config.trainer.val_before_train:
        yield Problem(
            path="trainer.val_before_train",
            value=False,
            reason="it contradicts trainer.val_only=true: nothing would be done",
            fix="leave one of the two out",
            involves=("trainer.val_only",),
        )


WEIGHT_BACKENDS = ("gloo", "mooncake", "naive", "shm")
"""The backends of weight updates that ship."""

VERLS_WEIGHT_BACKENDS = ("nccl", "hccl", "nixl", "kimi_ckpt_engine", "delta_sharded")
"""Those of verl besides."""


def weight_backend_is_known(config: "RunConfig") -> Iterator[Problem]:
    """`checkpoint_engine.backend` ships, or a module of the user's registers it."""
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    is_verls = engine.backend in VERLS_WEIGHT_BACKENDS
    if engine.backend not in WEIGHT_BACKENDS and not config.user_modules:
        yield Problem(
            path="actor_rollout_ref.rollout.checkpoint_engine.backend",
            value=engine.backend,
            reason="this back end is not there yet" if is_verls else "there is no such back end",
            is_unsupported=is_verls,
            fix=(
                f"choose from {', '.join(WEIGHT_BACKENDS)}, or set custom_backend_module to the "
                "file that registers it"
            ),
            involves=("actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module",),
        )


RULES: tuple[Callable[["RunConfig"], Iterator[Problem]], ...] = (
    batch_is_whole_mini_batches,
    mini_batch_is_whole_micro_batches,
    micro_batch_budget_fits_one_trajectory,
    group_has_two_sessions,
    grpo_does_not_discount,
    scale_factor_needs_its_mode,
    warm_up_is_given_once,
    validation_sampling_fits,
    resume_path_needs_its_mode,
    validation_only_validates,
    weight_backend_is_known,
)


def broken_rules(config: "RunConfig") -> list[Problem]:
    """Return the problems that all rules find in `config`."""
    return [problem for rule in RULES for problem in rule(config)]
