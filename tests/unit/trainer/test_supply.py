"""How many prompts are fed: by step, by warm-up, in place of what was evicted."""

import pytest

from rlcore.config import load_config
from rlcore.errors import ConfigError, RolloutError
from rlcore.trainer.supply import (
    check_generated,
    make_replay_buffer,
    num_missing_warmup,
    num_to_feed,
    sample_policy,
)

ASYNC = ["trainer.v1.trainer_mode=colocate_async"]
SAMPLER = "trainer.v1.sampler"
# The tiny preset trains 4 prompts a step.


def counts(pending=0, running=0, waiting=0, fed=0):
    return {"pending": pending, "running": running, "waiting": waiting, "fed": fed}


def feed(config, found, *, steps_left=10, fed_already=0):
    policy = sample_policy(config, is_async=True, inner_steps=1)
    return num_to_feed(config, found, steps_left=steps_left, fed_already=fed_already, policy=policy)


def test_a_step_feeds_a_batch_and_no_more_than_the_run_needs():
    config = load_config("grpo-tiny", ASYNC)
    assert feed(config, counts(waiting=4)) == 4
    # Two steps need 8, 6 are on their way.
    assert feed(config, counts(pending=2, running=2, waiting=2), steps_left=2) == 2
    assert feed(config, counts(running=4), steps_left=1) == 0
    assert feed(config, counts(running=4), steps_left=None) == 4
    # An earlier try fed its 4 already; asked again, the answer is the same.
    assert feed(config, counts(running=6), steps_left=2, fed_already=4) == 4


def test_pace_feeds_what_can_still_be_fresh():
    config = load_config(
        "grpo-tiny",
        [
            *ASYNC,
            f"{SAMPLER}.max_off_policy_strategy=pace",
            f"{SAMPLER}.max_off_policy_threshold=2",
        ],
    )
    assert feed(config, counts(running=4)) == 4
    assert feed(config, counts(running=7)) == 1


@pytest.mark.parametrize(
    ("num_batches", "found", "steps_left", "expected"),
    [
        (1, counts(), 10, 4),
        (1.5, counts(), 10, 6),
        (0, counts(), 10, 0),
        # A resume restored three of them.
        (1, counts(pending=1, running=1, waiting=1), 10, 1),
        (1, counts(waiting=4), 10, 0),
        # The last step feeds its own batch.
        (2, counts(), 2, 4),
        (2, counts(), 1, 0),
        (2, counts(), None, 8),
    ],
)
def test_warm_up_is_its_batches_less_what_is_there(num_batches, found, steps_left, expected):
    config = load_config("grpo-tiny", ASYNC)
    assert (
        num_missing_warmup(config, found, num_batches=num_batches, steps_left=steps_left)
        == expected
    )


def test_sync_has_no_staleness_and_verls_refill():
    filtering = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"]
    config = load_config(
        "grpo-tiny", [*filtering, "algorithm.filter_groups.max_inflight_gen_batches=1.5"]
    )
    policy = sample_policy(config, is_async=False, inner_steps=1)
    assert policy.max_off_policy_threshold is None
    assert (policy.filter_metric, policy.refill_factor, policy.max_in_flight) == ("acc", 2, 6)
    assert policy.discards_surplus
    assert not policy.keeps_supply
    policy = sample_policy(config, is_async=True, inner_steps=2, inner_step=0)
    assert (policy.refill_factor, policy.max_in_flight, policy.keeps_supply) == (1, None, True)
    assert (policy.prompts_per_step, policy.prompts_left_in_step) == (4, 2)
    assert (
        sample_policy(config, is_async=True, inner_steps=2, inner_step=1).prompts_left_in_step == 0
    )


def test_the_refill_of_a_step_has_a_limit():
    filtering = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=reward"]
    config = load_config("grpo-tiny", [*filtering, "algorithm.filter_groups.max_num_gen_batches=3"])
    check_generated(config, fed_for_step=8, count=4)
    with pytest.raises(RolloutError, match=r"9 prompts were generated.*max_num_gen_batches=3 x"):
        check_generated(config, fed_for_step=9, count=4)
    check_generated(load_config("grpo-tiny", filtering), fed_for_step=900, count=4)


def test_a_custom_sampler_is_a_subclass_with_its_kwargs(tmp_path):
    file = tmp_path / "my_sampler.py"
    file.write_text(
        "from rlcore.buffer.replay_buffer import ReplayBuffer\n"
        "class MyReplayBuffer(ReplayBuffer):\n"
        "    def sample(self, global_steps, partition_id, batch_size):\n"
        "        return super().sample(global_steps, partition_id, batch_size)\n"
        "class Other: ...\n"
    )
    custom = f"{SAMPLER}.custom_sampler"
    path = f"{custom}.path={file}"
    config = load_config(
        "grpo-tiny", [path, f"{custom}.name=MyReplayBuffer", f"+{SAMPLER}.sampler_kwargs.alpha=0.5"]
    )
    assert config.python_files == (str(file),)
    buffer = make_replay_buffer(config, None, run_id="r", attempt=1)
    assert type(buffer).__name__ == "MyReplayBuffer"
    assert buffer.sampler_kwargs == {"alpha": 0.5}
    assert buffer.trainer_mode == "sync"
    with pytest.raises(ConfigError, match=r"name=Other: .*must be a subclass of"):
        make_replay_buffer(
            load_config("grpo-tiny", [path, f"{custom}.name=Other"]), None, run_id="r", attempt=1
        )
    with pytest.raises(ConfigError, match="defines no 'Missing'"):
        make_replay_buffer(
            load_config("grpo-tiny", [path, f"{custom}.name=Missing"]), None, run_id="r", attempt=1
        )
