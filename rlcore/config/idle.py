"""Keys that are given and have no effect beside others: one notice each.

verl takes them in silence. Whether a key was given is known before validation only, so this looks
at the raw tree; which switch is off is asked of the checked configuration.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from rlcore.config.problems import show
from rlcore.config.queue import MooncakeStoreConfig
from rlcore.config.run import RunConfig
from rlcore.config.tree import Tree, get, leaves

_ACTOR: Final = "actor_rollout_ref.actor."
_ROLLOUT: Final = "actor_rollout_ref.rollout."
_ENGINE: Final = "actor_rollout_ref.rollout.checkpoint_engine."
_FILTER: Final = "algorithm.filter_groups."
_REWARD: Final = "reward."
_OVERLONG: Final = "reward.reward_kwargs."
_VAL: Final = "actor_rollout_ref.rollout.val_kwargs."
_SAMPLER: Final = "trainer.v1.sampler."
_QUEUE: Final = "transfer_queue.backend."
_STORE: Final = f"{_QUEUE}MooncakeStore."
_BUILT_IN_MANAGERS: Final = frozenset({"naive", "dapo", "rate_limited", "limited"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Idle:
    """Keys that one setting leaves without effect."""

    keys: tuple[str, ...]
    because: Callable[[RunConfig], str | None]
    """The setting, as one would write it; None where the keys have an effect."""


def _when(is_idle: Callable[[RunConfig], bool], setting: str) -> Callable[[RunConfig], str | None]:
    return lambda config: setting if is_idle(config) else None


def _not_read_by_the_engine(config: RunConfig) -> str | None:
    name = config.actor_rollout_ref.rollout.name
    return f"{_ROLLOUT}name={name}" if name == "transformers" else None


def _no_gpu(config: RunConfig) -> str | None:
    is_idle = config.actor_rollout_ref.rollout.name == "vllm" and config.trainer.device == "cpu"
    return "trainer.device=cpu" if is_idle else None


_OF_GPUS = (
    f"{_ROLLOUT}enforce_eager",
    f"{_ROLLOUT}gpu_memory_utilization",
    f"{_ROLLOUT}sleep_level",
)

IDLE: tuple[Idle, ...] = (
    Idle(
        keys=(
            f"{_ROLLOUT}data_parallel_size",
            f"{_ROLLOUT}enable_chunked_prefill",
            f"{_ROLLOUT}enable_prefix_caching",
            f"{_ROLLOUT}expert_parallel_size",
            f"{_ROLLOUT}max_num_batched_tokens",
            f"{_ROLLOUT}tensor_model_parallel_size",
            *_OF_GPUS,
        ),
        because=_not_read_by_the_engine,
    ),
    Idle(keys=_OF_GPUS, because=_no_gpu),
    Idle(
        keys=("deadlines.save_snapshot",),
        because=_when(lambda c: not c.trainer.snapshots, "trainer.snapshots=false"),
    ),
    Idle(
        keys=(f"{_QUEUE}SimpleStorage.total_storage_size",),
        because=_when(
            lambda c: c.transfer_queue.backend.storage_backend == "MooncakeStore",
            f"{_QUEUE}storage_backend=MooncakeStore",
        ),
    ),
    Idle(
        keys=tuple(f"{_STORE}{name}" for name in MooncakeStoreConfig.model_fields),
        because=_when(
            lambda c: c.transfer_queue.backend.storage_backend != "MooncakeStore",
            f"{_QUEUE}storage_backend=SimpleStorage",
        ),
    ),
    Idle(
        keys=(f"{_STORE}metadata_server",),
        because=_when(
            lambda c: (
                c.transfer_queue.backend.storage_backend == "MooncakeStore"
                and c.transfer_queue.backend.MooncakeStore.auto_init
            ),
            f"{_STORE}auto_init=true",
        ),
    ),
    Idle(
        keys=(f"{_STORE}device_name",),
        because=_when(
            lambda c: (
                c.transfer_queue.backend.storage_backend == "MooncakeStore"
                and c.transfer_queue.backend.MooncakeStore.protocol == "tcp"
            ),
            f"{_STORE}protocol=tcp",
        ),
    ),
    Idle(
        keys=(f"{_ACTOR}ppo_micro_batch_size_per_gpu",),
        because=_when(lambda c: c.actor_rollout_ref.actor.use_dynamic_bsz, "use_dynamic_bsz=true"),
    ),
    Idle(
        keys=(f"{_ACTOR}ppo_max_token_len_per_gpu",),
        because=_when(
            lambda c: not c.actor_rollout_ref.actor.use_dynamic_bsz, "use_dynamic_bsz=false"
        ),
    ),
    Idle(
        keys=("critic.ppo_micro_batch_size_per_gpu", "critic.forward_micro_batch_size_per_gpu"),
        because=_when(
            lambda c: c.needs_critic and c.critic_is_by_tokens, "critic.use_dynamic_bsz=true"
        ),
    ),
    Idle(
        keys=("critic.ppo_max_token_len_per_gpu", "critic.forward_max_token_len_per_gpu"),
        because=_when(
            lambda c: c.needs_critic and not c.critic_is_by_tokens, "critic.use_dynamic_bsz=false"
        ),
    ),
    Idle(
        keys=(
            f"{_FILTER}metric",
            f"{_FILTER}max_inflight_gen_batches",
            f"{_FILTER}max_num_gen_batches",
        ),
        because=_when(lambda c: not c.algorithm.filter_groups.enable, f"{_FILTER}enable=false"),
    ),
    Idle(
        keys=(
            f"{_OVERLONG}max_resp_len",
            f"{_OVERLONG}overlong_buffer_cfg.len",
            f"{_OVERLONG}overlong_buffer_cfg.penalty_factor",
            f"{_OVERLONG}overlong_buffer_cfg.log",
        ),
        because=_when(
            lambda c: (
                c.reward.reward_manager.name in _BUILT_IN_MANAGERS
                and not c.reward.reward_kwargs.overlong_buffer_cfg.enable
            ),
            f"{_OVERLONG}overlong_buffer_cfg.enable=false",
        ),
    ),
    Idle(
        keys=(f"{_REWARD}estimated_tokens_per_request",),
        because=_when(
            lambda c: (
                c.reward.reward_manager.name in _BUILT_IN_MANAGERS and c.reward.max_tpm is None
            ),
            "reward.max_tpm=null",
        ),
    ),
    Idle(
        keys=(
            f"{_REWARD}custom_reward_function.name",
            f"{_REWARD}custom_reward_function.reward_kwargs",
        ),
        because=_when(
            lambda c: c.reward.custom_reward_function.path is None,
            "reward.custom_reward_function.path=null",
        ),
    ),
    Idle(
        keys=(
            f"{_SAMPLER}max_off_policy_threshold",
            f"{_SAMPLER}max_off_policy_strategy",
            f"{_SAMPLER}staleness_basis",
        ),
        because=_when(
            lambda c: c.trainer.v1.trainer_mode == "sync", "trainer.v1.trainer_mode=sync"
        ),
    ),
    Idle(
        keys=(f"{_SAMPLER}sampler_kwargs",),
        because=_when(
            lambda c: c.trainer.v1.sampler.custom_sampler.path is None,
            f"{_SAMPLER}custom_sampler.path=null",
        ),
    ),
    Idle(
        keys=(f"{_ACTOR}policy_loss.decoupled_cap_mode",),
        because=_when(
            lambda c: c.actor_rollout_ref.actor.policy_loss.decoupled_cap is None,
            "decoupled_cap=null",
        ),
    ),
    Idle(
        keys=(f"{_VAL}top_p", f"{_VAL}top_k"),
        because=_when(
            lambda c: not c.actor_rollout_ref.rollout.val_kwargs.do_sample, f"{_VAL}do_sample=false"
        ),
    ),
    Idle(
        keys=(f"{_ENGINE}update_weights_bucket_megabytes",),
        because=_when(
            lambda c: c.actor_rollout_ref.rollout.checkpoint_engine.backend == "naive",
            f"{_ENGINE}backend=naive",
        ),
    ),
    Idle(
        keys=("ray.num_cpus",),
        because=lambda c: None if c.ray.address is None else f"ray.address={c.ray.address}",
    ),
)


def idle_keys(tree: Tree, config: RunConfig) -> list[str]:
    """Return notices of the keys in `tree` that others leave without effect."""
    given = dict(leaves(tree))
    return [
        f"{key}={show(value)}: it has no effect with {because}"
        for row in IDLE
        if (because := row.because(config)) is not None
        for key, value in _given(given, row.keys)
    ] + _of_both_sides(tree)


def _given(given: dict[str, Any], keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for key in keys:
        if given.get(key) is not None:
            yield key, given[key]


def _of_both_sides(tree: Tree) -> list[str]:
    """Return what is said of settings that two keys share."""
    notices: list[str] = []
    clips = [f"{_ACTOR}{name}" for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")]
    values = [get(tree, path) for path in clips]
    if None not in values:
        notices.append(f"{clips[0]}={show(values[0])}: clip_ratio_low and clip_ratio_high hold")
    in_loss, in_reward = f"{_ACTOR}use_kl_loss", "algorithm.use_kl_in_reward"
    if get(tree, in_loss) and get(tree, in_reward):
        notices.append(f"{in_reward}=true: the KL penalty counts twice, with {in_loss}=true")
    return notices
