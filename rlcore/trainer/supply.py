"""How many prompts are on their way: what a step feeds, the warm-up, and the sampler's policy.

Pure functions of configuration and counts; the trainer asks them and feeds.
"""

import logging
from collections.abc import Mapping
from typing import Any

from rlcore.buffer.policy import SamplePolicy, num_admitted
from rlcore.buffer.replay_buffer import BatchSource, ReplayBuffer
from rlcore.config import RunConfig
from rlcore.errors import ConfigError, RolloutError
from rlcore.user_code import load_user_object

logger = logging.getLogger(__name__)

Counts = Mapping[str, int]
"""The ledger's counts of a partition."""


def num_outstanding(counts: Counts) -> int:
    """Return how many prompts are fed and neither sampled nor evicted."""
    return counts["pending"] + counts["running"] + counts["waiting"]


def sample_policy(
    config: RunConfig,
    *,
    is_async: bool,
    inner_steps: int,
    inner_step: int = 0,
    trainer_version: int | None = None,
    skipped_versions: tuple[int, ...] = (),
) -> SamplePolicy:
    """Return how the batch of an inner step is chosen.

    Args:
        config: `trainer.v1.sampler` and `algorithm.filter_groups`.
        is_async: Whether prompts of several steps are on their way; otherwise nothing is stale.
        inner_steps: Of a step.
        inner_step: The one that samples, from 0.
        trainer_version: The trainer's weight version, for staleness by tokens.
        skipped_versions: Version numbers of dead attempts, which name none of its weights.
    """
    sampler, filtering = config.trainer.v1.sampler, config.algorithm.filter_groups
    per_step = config.data.train_batch_size
    metric = filtering.metric if filtering.enable else None
    in_sync = not is_async and metric is not None
    return SamplePolicy(
        max_off_policy_threshold=sampler.max_off_policy_threshold if is_async else None,
        strategy=sampler.max_off_policy_strategy,
        basis=sampler.staleness_basis,
        trainer_version=trainer_version,
        skipped_versions=skipped_versions,
        prompts_per_step=per_step,
        prompts_left_in_step=per_step // inner_steps * (inner_steps - 1 - inner_step),
        filter_metric=metric,
        refill_factor=2 if in_sync else 1,
        max_in_flight=int(filtering.max_inflight_gen_batches * per_step) if in_sync else None,
        keeps_supply=is_async,
        discards_surplus=in_sync,
    )


def num_to_feed(
    config: RunConfig,
    counts: Counts,
    *,
    steps_left: int | None,
    fed_already: int,
    policy: SamplePolicy,
) -> int:
    """Return how many prompts an asynchronous mode feeds at the beginning of a step.

    A batch, less when fewer are needed to the end of the run, so that none is generated for
    nothing, and less under `pace`.

    Args:
        config: The batch size.
        counts: Of the training partition.
        steps_left: Steps from this one to the last; None: not known.
        fed_already: Prompts that an earlier try of this phase fed.
        policy: Of the step.
    """
    per_step = config.data.train_batch_size
    outstanding = num_outstanding(counts) - fed_already
    wanted = per_step
    if steps_left is not None:
        wanted = max(0, min(per_step, steps_left * per_step - outstanding))
    return num_admitted(wanted, outstanding=outstanding, per_step=per_step, policy=policy)


def num_missing_warmup(
    config: RunConfig, counts: Counts, *, num_batches: float, steps_left: int | None
) -> int:
    """Return how many prompts the warm-up feeds: its batches less what a resume restored.

    Args:
        config: The batch size.
        counts: Of the training partition.
        num_batches: Depth of the pipeline; a fraction is allowed.
        steps_left: Steps from the next one to the last: what they need without the batches that
            they feed themselves is no more than one step less.
    """
    per_step = config.data.train_batch_size
    target = round(num_batches * per_step)
    if steps_left is not None:
        target = min(target, max(0, steps_left - 1) * per_step)
    return max(0, target - num_outstanding(counts))


def check_generated(config: RunConfig, *, fed_for_step: int, count: int) -> None:
    """Hold the refill of one step to `algorithm.filter_groups.max_num_gen_batches`.

    Raises:
        RolloutError: `count` more prompts would exceed it.
    """
    filtering = config.algorithm.filter_groups
    if not filtering.enable or not filtering.max_num_gen_batches:
        return
    limit = filtering.max_num_gen_batches * config.data.train_batch_size
    if fed_for_step + count > limit:
        raise RolloutError(
            f"{fed_for_step} prompts were generated for this step, {count} more are needed, over "
            f"algorithm.filter_groups.max_num_gen_batches={filtering.max_num_gen_batches} x "
            f"data.train_batch_size={config.data.train_batch_size}: most groups have the same "
            f"{filtering.metric} in all sessions. Take easier or harder prompts, more "
            "sessions a prompt (rollout.n), or raise the limit"
        )


def make_replay_buffer(
    config: RunConfig, ledger: BatchSource, *, run_id: str, attempt: int
) -> ReplayBuffer:
    """Return the buffer, of the class that `trainer.v1.sampler.custom_sampler` names.

    Raises:
        ConfigError: the file cannot be loaded, or what it calls so is no ReplayBuffer.
    """
    sampler = config.trainer.v1.sampler
    buffer_class: Any = ReplayBuffer
    custom = sampler.custom_sampler
    if custom.path is not None and custom.name is not None:
        buffer_class = load_user_object(custom.path, custom.name)
        if not (isinstance(buffer_class, type) and issubclass(buffer_class, ReplayBuffer)):
            raise ConfigError(
                f"trainer.v1.sampler.custom_sampler.name={custom.name}: {custom.path} defines it "
                f"as {buffer_class!r}; it must be a subclass of "
                "rlcore.buffer.replay_buffer.ReplayBuffer"
            )
    return buffer_class(
        ledger,
        run_id=run_id,
        attempt=attempt,
        trainer_mode=config.trainer.v1.trainer_mode,
        trainer_config=config.trainer,
        sampler_kwargs=sampler.sampler_kwargs,
    )
