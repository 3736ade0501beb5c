"""The advantage phase against a queue in memory: every estimator, corrections, named rewards."""

import pytest
import torch

from rlcore.algorithms import ADV_ESTIMATORS
from rlcore.config.names import kind_of
from rlcore.errors import DataError
from rlcore.testing.queue import MemoryQueue
from rlcore.trainer.advantage import (
    AdvantageSpec,
    compute_advantage,
    copy_rollout_log_probs,
    value_metrics,
)
from rlcore.types import SampledBatch

# two prompts, two sessions each; the first session of u0 stored two outputs
KEYS = ["u0_0_0", "u0_0_1", "u0_1_0", "u1_0_0", "u1_1_0"]
REWARDS = [2.0, 2.0, 0.0, 1.0, 0.5]
MASKS = [[1, 0, 1], [1], [1, 1], [1, 1, 1], [1]]
SINGLE = [0, 2, 3, 4]


def column(queue: MemoryQueue, name: str, key: str) -> torch.Tensor:
    return queue.rows["run/train", key][name]


def batch(rows=SINGLE, baselines=None) -> SampledBatch:
    tags = []
    for row in rows:
        uid, session, _ = KEYS[row].split("_")
        extra = {"acc": REWARDS[row], "format": float(row % 2)}
        tags.append({"uid": uid, "session_id": int(session), "reward": REWARDS[row],
                     "reward_extra": extra})  # fmt: skip
        if baselines is not None:
            tags[-1]["baseline"] = baselines[uid]
    keys = [KEYS[row] for row in rows]
    return SampledBatch(lease_id="l", global_step=1, inner_step=0, uids=["u0", "u1"], keys=keys,
                        tags=tags, metrics={})  # fmt: skip


@pytest.fixture
def queue() -> MemoryQueue:
    queue = MemoryQueue()
    generator = torch.Generator().manual_seed(0)
    masks = [torch.tensor(mask) for mask in MASKS]
    rewards = []
    for mask, reward in zip(MASKS, REWARDS, strict=True):
        row = torch.zeros(len(mask))
        row[-1] = reward
        rewards.append(row)
    noise = [torch.rand(len(mask), generator=generator) for mask in MASKS]
    queue.put("run/train", KEYS, {
        "response_mask": masks, "rm_scores": rewards, "values": noise,
        "old_log_probs": [-row for row in noise],
        "rollout_log_probs": [torch.full_like(row, -0.5) for row in noise],
    })  # fmt: skip
    return queue


def run(queue: MemoryQueue, rows=SINGLE, baselines=None, **spec):
    name = spec.pop("name")
    asked = AdvantageSpec(estimator=ADV_ESTIMATORS.get(name), **spec)
    metrics = compute_advantage(queue, "run/train", batch(rows, baselines), asked)
    return metrics, [column(queue, "advantages", KEYS[row]).tolist() for row in rows]


def test_a_group_is_compared_and_masked_tokens_have_nothing(queue: MemoryQueue):
    metrics, advantages = run(queue, name="dr_grpo")
    assert advantages == [[1, 0, 1], [-1, -1], [0.25] * 3, [-0.25]]
    # 1, 1, -1, -1, 0.25 x 3, -0.25
    assert metrics["critic/advantages/mean"] == pytest.approx(0.5 / 8)
    assert metrics["critic/returns/max"] == 1 and metrics["critic/advantages/min"] == -1
    written = {name for row in queue.rows.values() for name in row}
    assert written & {"train_mask", "rollout_is_weights"} == set()


def test_settings_reach_the_estimator(queue: MemoryQueue):
    _, advantages = run(queue, name="grpo", settings={"norm_by_std": False})
    assert advantages[0] == [1, 0, 1]
    _, advantages = run(queue, name="reinforce_plus_plus",
                        settings={"gamma": 0.5, "whiten": False})  # fmt: skip
    # over the tool token without discount
    assert advantages == [[1, 0, 2], [0, 0], [0.25, 0.5, 1], [0.5]]


def test_a_session_of_two_outputs_counts_once(queue: MemoryQueue):
    _, advantages = run(queue, rows=range(5), name="dr_grpo")
    assert advantages == [[1, 0, 1], [1], [-1, -1], [0.25] * 3, [-0.25]]


def test_every_estimator_runs(queue: MemoryQueue):
    baselines = {"u0": 0.5, "u1": 1.0}
    for name in kind_of("algorithm.adv_estimator").works:
        _, advantages = run(queue, name=name, baselines=baselines, reward_keys=("acc", "format"))
        assert any(any(row) for row in advantages), name
    metrics, advantages = run(queue, name="remax", baselines=baselines)
    assert advantages == [[1.5, 0, 1.5], [-0.5, -0.5], [0, 0, 0], [-0.5]]
    assert metrics["critic/baselines/mean"] == 0.75
    with pytest.raises(DataError, match="row u0_0_0 has no baseline"):
        run(queue, name="remax")
    _, advantages = run(queue, name="gae", settings={"whiten": False})
    assert advantages[3] == pytest.approx([0.5 - column(queue, "values", KEYS[4])[0].item()])


def test_named_rewards(queue: MemoryQueue):
    _, advantages = run(
        queue, name="gdpo", reward_keys=("acc",),
        settings={"norm_by_std": False, "batch_norm": "none"},
    )  # fmt: skip
    assert advantages[0] == [1, 0, 1]
    with pytest.raises(DataError, match="row u0_0_0 lacks the rewards style of"):
        run(queue, name="gdpo", reward_keys=("acc", "style"))
    with pytest.raises(ValueError, match="needs score_matrix"):
        run(queue, name="gdpo")


def test_correction_is_written_beside_the_advantages(queue: MemoryQueue):
    metrics, advantages = run(
        queue, name="dr_grpo", weights={"level": "token", "upper": 1.2},
        rejections=[{"stat": "ratio", "level": "token", "upper": 1.0}],
    )  # fmt: skip
    # the statistics are those of the original mask
    assert advantages == [[1, 0, 1], [-1, -1], [0.25] * 3, [-0.25]]
    for row in SINGLE:
        old = column(queue, "old_log_probs", KEYS[row])
        ratio = (old + 0.5).exp()
        kept = (torch.tensor(MASKS[row]) == 1) & (ratio <= 1)
        assert column(queue, "train_mask", KEYS[row]).tolist() == kept.long().tolist()
        weights = column(queue, "rollout_is_weights", KEYS[row])
        assert weights.tolist() == pytest.approx((ratio.clamp(max=1.2) * kept).tolist())
    assert 0 < metrics["rollout_corr/rollout_rs_masked_fraction"] < 1
    assert metrics["rollout_corr/rollout_is_max"] <= 1.2 + 1e-6
    only, _ = run(queue, name="dr_grpo", weights={})
    assert "rollout_corr/rollout_rs_masked_fraction" not in only


def test_bypass_mode_takes_the_engines_log_probs(queue: MemoryQueue):
    assert copy_rollout_log_probs(queue, "run/train", batch()) == {}
    assert column(queue, "old_log_probs", "u1_0_0").tolist() == [-0.5] * 3


def test_explained_variance():
    returns, mask = torch.tensor([[1.0, 3.0, 9.0]]), torch.tensor([[1, 1, 0]])
    for values, expected in (([1.0, 3.0, 0.0], 1), ([2.0, 2.0, 0.0], 0), ([3.0, 1.0, 0.0], -3)):
        found = value_metrics(torch.tensor([values]), returns, mask)
        assert found["critic/vf_explained_var"] == pytest.approx(expected)
        assert found["critic/values/max"] == max(values[:2])
    same = value_metrics(torch.ones(1, 3), torch.ones(1, 3), mask)
    assert same["critic/vf_explained_var"] == 0
