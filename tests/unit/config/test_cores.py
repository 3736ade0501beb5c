"""Which cores each side of a run computes on."""

import pytest

from rlcore.config import load_config
from rlcore.config.cores import core_shares, threads_on

NUM_REPLICAS = "actor_rollout_ref.rollout.num_replicas"


def shares(num_cores, num_replicas, **overrides):
    config = load_config("grpo-tiny", {NUM_REPLICAS: num_replicas, **overrides})
    return core_shares(config, is_separate=True, cores=range(num_cores))


@pytest.mark.parametrize(
    ("num_cores", "num_replicas", "expected"),
    [
        (1, 1, {}),
        (2, 1, {"trainer": (0,), "replica-0": (1,)}),
        (2, 3, {"trainer": (0,), "replica-0": (1,), "replica-1": (1,), "replica-2": (1,)}),
        (7, 2, {"trainer": (0, 1, 2, 3), "replica-0": (4, 6), "replica-1": (5,)}),
    ],
)
def test_the_trainer_has_half_and_the_replicas_share_the_rest(num_cores, num_replicas, expected):
    assert shares(num_cores, num_replicas) == expected


def test_nothing_is_shared_out_where_both_take_turns_or_hosts_are_others():
    config = load_config("grpo-tiny")
    assert core_shares(config, is_separate=False, cores=range(8)) == {}
    assert shares(8, 1, **{"ray.address": "10.0.0.1:6379"}) == {}


def test_a_process_has_as_many_threads_as_cores_but_not_under_full_determinism():
    config = load_config("grpo-tiny", {"ray.num_threads": 4})
    assert [threads_on(config, cores) for cores in ((), (1,), (1, 2), range(8))] == [4, 1, 2, 4]
    fixed = load_config(
        "grpo-tiny",
        {"ray.num_threads": 4, "actor_rollout_ref.rollout.full_determinism": True},
    )
    assert threads_on(fixed, (1,)) == 4
