"""Rewards, their parts, turns and lengths of a batch as metrics."""

import pytest

from rlcore.errors import DataError
from rlcore.tracking.batch_metrics import batch_metrics
from rlcore.types import SampledBatch


def batch_of(*tags):
    common = {"uid": "u", "prompt_len": 5, "num_turns": 2}
    return SampledBatch(
        lease_id="l", global_step=1, inner_step=0, uids=["u"], metrics={},
        keys=[f"u_{i}_0" for i in range(len(tags))],
        tags=[{**common, "session_id": i, **tag} for i, tag in enumerate(tags)],
    )  # fmt: skip


def test_parts_of_rewards_have_means_of_their_own():
    metrics = batch_metrics(
        batch_of(
            {"reward": 1.5, "reward_extra": {"acc": 1.0, "correct": 1.0, "brief": 0.5, "said": "a"},
             "response_len": 10, "seq_len": 15, "num_turns": 4},
            {"reward": -0.5, "reward_extra": {"acc": 0.0, "correct": 0.0, "brief": -0.5},
             "response_len": 4, "seq_len": 9},
            {"reward": 0.5, "reward_extra": {"correct": 0.5}, "response_len": 1, "seq_len": 6},
        )
    )  # fmt: skip
    assert metrics == {
        # (1.5 - 0.5 + 0.5) / 3
        "critic/score/mean": 0.5, "critic/score/max": 1.5, "critic/score/min": -0.5,
        "critic/rewards/mean": 0.5, "critic/rewards/max": 1.5, "critic/rewards/min": -0.5,
        "critic/acc/mean": 0.5,  # of the two that have one
        "reward/correct/mean": 0.5, "reward/brief/mean": 0.0,  # texts have no mean
        "num_turns/mean": 8 / 3, "num_turns/max": 4, "num_turns/min": 2,
        "prompt_length/mean": 5, "prompt_length/max": 5, "prompt_length/min": 5,
        "response_length/mean": 5, "response_length/max": 10, "response_length/min": 1,
        "perf/total_num_tokens": 30,
    }  # fmt: skip


def test_a_row_without_a_reward_is_named():
    lengths = {"reward_extra": {}, "response_len": 1, "seq_len": 6}
    with pytest.raises(DataError, match=r"rows without a reward: u_1_0 \(1 in all\)"):
        batch_metrics(batch_of({"reward": 0.0, **lengths}, {"reward": None, **lengths}))
