"""Rules about sizes: steps, batches, mini-batches, micro-batches and ranks, with the sums shown."""

from collections.abc import Iterator
from typing import Final

from rlcore.config.problems import Problem
from rlcore.config.run import RunConfig

_ACTOR: Final = "actor_rollout_ref.actor."
_MINI_BATCH: Final = (
    f"{_ACTOR}ppo_mini_batch_size",
    f"{_ACTOR}use_dynamic_bsz",
    "actor_rollout_ref.rollout.n",
)


def batch_is_whole_mini_batches(config: RunConfig) -> Iterator[Problem]:
    """`data.train_batch_size` is a multiple of `ppo_mini_batch_size`."""
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if batch % mini:
        fix = f"set ppo_mini_batch_size to a divisor of {batch}"
        if batch > mini:
            fix += f", or data.train_batch_size to {batch - batch % mini}"
        yield Problem(
            path=f"{_ACTOR}ppo_mini_batch_size",
            value=mini,
            reason=(
                "the step's prompts must be whole mini-batches: data.train_batch_size "
                f"{batch} = {batch // mini} x ppo_mini_batch_size {mini} + {batch % mini}"
            ),
            fix=fix,
            involves=("data.train_batch_size",),
        )


def mini_batch_is_whole_micro_batches(config: RunConfig) -> Iterator[Problem]:
    """A rank's share of a mini-batch is a multiple of `ppo_micro_batch_size_per_gpu`."""
    actor, n = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    ranks = config.num_ranks
    micro, rows = actor.ppo_micro_batch_size_per_gpu, actor.ppo_mini_batch_size * n
    path = f"{_ACTOR}ppo_micro_batch_size_per_gpu"
    if actor.use_dynamic_bsz or rows % ranks:
        return
    share = rows // ranks
    if micro is None:
        yield Problem(
            path=path,
            reason="nothing says how mini-batches are cut to fit into memory",
            fix=f"set it to a divisor of {share} trajectories, or actor.use_dynamic_bsz=true",
            involves=_MINI_BATCH,
        )
    elif share % micro:
        on_ranks = f" / {ranks} ranks = {share}" if ranks > 1 else ""
        yield Problem(
            path=path,
            value=micro,
            reason=(
                "a mini-batch must be whole micro-batches: ppo_mini_batch_size "
                f"{actor.ppo_mini_batch_size} x rollout.n {n} = {rows} trajectories{on_ranks} = "
                f"{share // micro} x {micro} + {share % micro}"
            ),
            fix=f"set it to a divisor of {share}, or actor.use_dynamic_bsz=true",
            involves=_MINI_BATCH,
        )


def mini_batch_is_shared_out_evenly(config: RunConfig) -> Iterator[Problem]:
    """The trajectories of a mini-batch are a multiple of the training ranks."""
    actor, n, ranks = (
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.rollout.n,
        config.num_ranks,
    )
    rows = actor.ppo_mini_batch_size * n
    if rows % ranks:
        yield Problem(
            path="trainer.n_gpus_per_node",
            value=config.trainer.n_gpus_per_node,
            reason=(
                f"the ranks must share a mini-batch evenly: ppo_mini_batch_size "
                f"{actor.ppo_mini_batch_size} x rollout.n {n} = {rows} trajectories = "
                f"{rows // ranks} x {ranks} ranks (trainer.nnodes {config.trainer.nnodes} x "
                f"n_gpus_per_node {config.trainer.n_gpus_per_node}) + {rows % ranks}"
            ),
            fix=f"set ppo_mini_batch_size to a multiple of {ranks}",
            involves=(*_MINI_BATCH, "trainer.nnodes"),
        )


def micro_batch_budget_fits_one_trajectory(config: RunConfig) -> Iterator[Problem]:
    """With `use_dynamic_bsz` the token budget holds the longest trajectory."""
    actor, longest = config.actor_rollout_ref.actor, config.max_model_len
    if actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu < longest:
        yield Problem(
            path=f"{_ACTOR}ppo_max_token_len_per_gpu",
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
                f"{_ACTOR}use_dynamic_bsz",
            ),
        )


def cut_samples_fill_a_batch(config: RunConfig) -> Iterator[Problem]:
    """`data.train_max_samples` leaves at least one batch, and the steps that are asked for."""
    data, trainer = config.data, config.trainer
    rows, batch = data.train_max_samples, data.train_batch_size
    if rows < 1:
        return
    if rows < batch:
        yield Problem(
            path="data.train_max_samples",
            value=rows,
            reason=f"{rows} prompts are fewer than one batch: data.train_batch_size={batch}",
            fix=f"set it to {batch} or more, or -1",
            involves=("data.train_batch_size",),
        )
        return
    possible = trainer.total_epochs * (rows // batch)
    if trainer.total_training_steps is not None and trainer.total_training_steps > possible:
        yield Problem(
            path="trainer.total_training_steps",
            value=trainer.total_training_steps,
            reason=(
                f"it is more than the data gives: data.train_max_samples {rows} // "
                f"train_batch_size {batch} = {rows // batch} steps per epoch, x "
                f"trainer.total_epochs {trainer.total_epochs} = {possible} steps"
            ),
            fix=f"set it to {possible}, or raise total_epochs",
            involves=("data.train_max_samples", "data.train_batch_size", "trainer.total_epochs"),
        )


def prompts_are_fed_as_they_are(config: RunConfig) -> Iterator[Problem]:
    """`data.gen_batch_size` asks for what happens: a step at once, or one by one (verl's rule)."""
    data, mode = config.data, config.trainer.v1.trainer_mode
    size, batch = data.gen_batch_size, data.train_batch_size
    one_by_one = mode != "sync" or config.algorithm.filter_groups.enable
    if size is None or size == (1 if one_by_one else batch):
        return
    yield Problem(
        path="data.gen_batch_size",
        value=size,
        reason=(
            f"prompts are fed one by one with trainer.v1.trainer_mode={mode} and "
            "algorithm.filter_groups.enable="
            f"{str(config.algorithm.filter_groups.enable).lower()}"
            if one_by_one
            else f"a step's prompts are fed at once: data.train_batch_size={batch}"
        ),
        fix="leave it out",
        involves=(
            "data.train_batch_size", "trainer.v1.trainer_mode", "algorithm.filter_groups.enable"
        ),
    )  # fmt: skip


RULES = (
    prompts_are_fed_as_they_are,
    batch_is_whole_mini_batches,
    mini_batch_is_shared_out_evenly,
    mini_batch_is_whole_micro_batches,
    micro_batch_budget_fits_one_trajectory,
    cut_samples_fill_a_batch,
)
