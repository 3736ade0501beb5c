"""Rules about trainer modes, staleness, the buffer, resuming and what a run does at all."""

import math
from collections.abc import Iterator
from typing import Final

from rlcore.config.problems import Problem
from rlcore.config.run import RunConfig
from rlcore.config.tree import default_of

_MODE_SECTIONS: Final = ("colocate_async", "separate_async")
_MODE: Final = "trainer.v1.trainer_mode"
_SEPARATE: Final = "trainer.v1.separate_async."
_SAMPLER: Final = "trainer.v1.sampler."
_STORAGE: Final = "transfer_queue.backend.SimpleStorage.total_storage_size"
_ROLLOUT: Final = "actor_rollout_ref.rollout."
_MINI: Final = "actor_rollout_ref.actor.ppo_mini_batch_size"


def num_warmup_batches(config: RunConfig) -> float:
    """Return how many batches are fed before step 1; 0 in sync mode."""
    v1 = config.trainer.v1
    return {
        "colocate_async": v1.colocate_async.num_warmup_batches,
        "separate_async": v1.separate_async.num_warmup_batches,
    }.get(v1.trainer_mode, 0.0)


def separate_async_is_whole(config: RunConfig) -> Iterator[Problem]:
    """Verl's conditions of `separate_async`: batch, pool of its own, transport, reward pool."""
    if config.trainer.v1.trainer_mode != "separate_async":
        return
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    inner = config.trainer.v1.separate_async.parameter_sync_step
    rollout, model = config.actor_rollout_ref.rollout, config.reward.reward_model
    if batch != inner * mini:
        yield Problem(
            path="data.train_batch_size",
            value=batch,
            reason=(
                f"{_MODE}=separate_async makes one optimizer step per inner step: "
                f"parameter_sync_step {inner} x ppo_mini_batch_size {mini} = {inner * mini} "
                f"prompts, not {batch}"
            ),
            fix=f"set it to {inner * mini}",
            involves=(f"{_SEPARATE}parameter_sync_step", _MINI, _MODE),
        )
    on_gpu = config.trainer.device == "cuda"
    if on_gpu and rollout.nnodes * rollout.n_gpus_per_node == 0:
        yield Problem(
            path=f"{_ROLLOUT}nnodes",
            value=rollout.nnodes,
            reason=(
                f"{_MODE}=separate_async generates on devices of its own: {_ROLLOUT}nnodes "
                f"{rollout.nnodes} x n_gpus_per_node {rollout.n_gpus_per_node} = 0"
            ),
            fix="set both above 0",
            involves=(_MODE, f"{_ROLLOUT}n_gpus_per_node"),
        )
    if rollout.checkpoint_engine.backend == "naive":
        yield Problem(
            path=f"{_ROLLOUT}checkpoint_engine.backend",
            value="naive",
            reason=f"with {_MODE}=separate_async weights must reach other processes' devices",
            fix="set it to shm on one host, or to nccl",
            involves=(_MODE,),
        )
    if model.enable and not model.enable_resource_pool:
        yield Problem(
            path="reward.reward_model.enable_resource_pool",
            value=False,
            reason=f"{_MODE}=separate_async leaves training devices no idle time for it",
            fix="set it to true",
            involves=(_MODE, "reward.reward_model.enable"),
        )


def settings_of_another_mode_do_nothing(config: RunConfig) -> Iterator[Problem]:
    """A built-in mode does not read the section of another; modes of your own may read both."""
    v1 = config.trainer.v1
    if v1.trainer_mode not in ("sync", *_MODE_SECTIONS):
        return
    for mode in _MODE_SECTIONS:
        if mode == v1.trainer_mode:
            continue
        for key in ("num_warmup_batches", "parameter_sync_step", "in_flight_update"):
            path = f"trainer.v1.{mode}.{key}"
            value = getattr(getattr(v1, mode), key, None)
            if value is not None and value != default_of(path):
                yield Problem(
                    path=path,
                    value=value,
                    reason=f"it has no effect with {_MODE}={v1.trainer_mode}",
                    fix=f"leave it out, or set {_MODE}={mode}",
                    involves=(_MODE,),
                )


def warm_up_stays_fresh(config: RunConfig) -> Iterator[Problem]:
    """Warm-up is the depth of the pipeline: what waits that long must still be fresh enough."""
    mode, warmup = config.trainer.v1.trainer_mode, num_warmup_batches(config)
    limit = config.trainer.v1.sampler.max_off_policy_threshold
    if limit is None or warmup <= limit - 1:
        return
    yield Problem(
        path=f"trainer.v1.{mode}.num_warmup_batches",
        value=warmup,
        reason=(
            f"with {_MODE}={mode} a batch waits {warmup:g} steps before it is trained, but "
            f"{_SAMPLER}max_off_policy_threshold {limit} allows a staleness of {limit} - 1 = "
            f"{limit - 1}: "
            "every group would be stale"
        ),
        fix=f"set it to {limit - 1}, or the threshold to {math.ceil(warmup) + 1}",
        involves=(_MODE, f"{_SAMPLER}max_off_policy_threshold"),
    )


def rows_in_flight(config: RunConfig) -> int:
    """Return the trajectories of training that the queue holds at most: the warm-up and a step.

    Dynamic sampling may have as many batches on their way as it is allowed.
    """
    filtering = config.algorithm.filter_groups
    surplus = math.ceil(filtering.max_inflight_gen_batches) if filtering.enable else 0
    batches = 1 + math.ceil(num_warmup_batches(config)) + surplus
    return batches * config.num_trajectories


def storage_holds_what_is_in_flight(config: RunConfig) -> Iterator[Problem]:
    """The queue's capacity holds the warm-up and a step."""
    size, rows = (
        config.transfer_queue.backend.SimpleStorage.total_storage_size,
        rows_in_flight(config),
    )
    if size is not None and size < rows:
        batches = rows // config.num_trajectories
        yield Problem(
            path=_STORAGE,
            value=size,
            reason=(
                f"{batches} batches (a step, the warm-up, what dynamic sampling adds) x "
                f"data.train_batch_size {config.data.train_batch_size} x rollout.n "
                f"{config.actor_rollout_ref.rollout.n} = {rows} trajectories wait at the same time "
                f"({_MODE}={config.trainer.v1.trainer_mode})"
            ),
            fix=f"set it to {rows} or more, or null",
            involves=("data.train_batch_size", f"{_ROLLOUT}n", _MODE),
        )


def custom_sampler_is_a_class_in_a_file(config: RunConfig) -> Iterator[Problem]:
    """`custom_sampler.path` and `.name` go together."""
    sampler = config.trainer.v1.sampler.custom_sampler
    if (sampler.path is None) != (sampler.name is None):
        missing = "path" if sampler.path is None else "name"
        given = "name" if missing == "path" else "path"
        yield Problem(
            path=f"{_SAMPLER}custom_sampler.{missing}",
            reason=f"{_SAMPLER}custom_sampler.{given} needs it",
            fix="set it, or leave both out",
            involves=(f"{_SAMPLER}custom_sampler.{given}",),
            has_value=False,
        )


def resume_path_needs_its_mode(config: RunConfig) -> Iterator[Problem]:
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


def validation_only_validates(config: RunConfig) -> Iterator[Problem]:
    """`val_only` happens in the validation before training."""
    if config.trainer.val_only and not config.trainer.val_before_train:
        yield Problem(
            path="trainer.val_before_train",
            value=False,
            reason="it contradicts trainer.val_only=true: nothing would be done",
            fix="leave one of the two out",
            involves=("trainer.val_only",),
        )


RULES = (
    separate_async_is_whole,
    settings_of_another_mode_do_nothing,
    warm_up_stays_fresh,
    storage_holds_what_is_in_flight,
    custom_sampler_is_a_class_in_a_file,
    resume_path_needs_its_mode,
    validation_only_validates,
)
