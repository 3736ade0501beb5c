"""The KL penalty in the reward and its controller, which moves once per inner step."""

import pytest
import torch

from rlcore.config import load_config
from rlcore.trainer.reference_critic import (
    KL_METRIC,
    KL_STATE,
    KLPenalty,
    kl_penalty,
    move_kl_weight,
)
from rlcore.types import CallKey

ADAPTIVE = [
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.5",
    "algorithm.kl_ctrl.target_kl=0.1",
    "algorithm.kl_ctrl.horizon=100",
]


def key(step: int, inner: int = 0) -> CallKey:
    return CallKey(run_id="r", attempt=1, global_step=step, inner_step=inner)


def test_the_penalty_is_taken_off_tokens_and_outcomes():
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    columns = {
        "rm_scores": torch.tensor([[0.0, 0.0, 1.0], [0.0, 2.0, 0.0]]),
        "old_log_probs": torch.tensor([[-1.0, 9.0, -2.0], [-1.0, -1.0, 9.0]]),
        "ref_log_prob": torch.tensor([[-2.0, 0.0, -2.5], [-1.0, -3.0, 0.0]]),
    }
    penalty = KLPenalty(beta=0.1, kind="k1")
    rewards, scores, metrics = penalty(columns, torch.tensor([1.0, float("nan")]), mask)
    # d = 1, -, 0.5 and 0, 2, -: 0.1 of it off
    wanted = torch.tensor([[-0.1, 0.0, 0.95], [0.0, 1.8, 0.0]])
    assert torch.allclose(rewards, wanted)
    assert scores[0].item() == pytest.approx(0.85) and scores[1].isnan()
    # row means 0.75 and 1
    assert metrics[KL_METRIC] == pytest.approx(0.875)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    assert metrics["critic/rewards/mean"] == pytest.approx(0.85)


def test_the_adaptive_weight_moves_once_per_inner_step_and_is_kept():
    config, state = load_config("grpo-tiny", ADAPTIVE), {}
    penalty = kl_penalty(config, state)
    assert penalty is not None and (penalty.beta, penalty.kind) == (0.5, "k1")
    metrics = {KL_METRIC: 0.11, "actor/reward_kl_penalty_coeff": 0.5}
    for place in (key(1), key(1)):  # a repeat changes nothing
        move_kl_weight(config, state, place, metrics, 16)
    # 0.11 / 0.1 - 1 = 0.1, times 16 / 100
    assert state[KL_STATE]["beta"] == pytest.approx(0.5 * 1.016)
    moved = kl_penalty(config, state)
    assert moved is not None and moved.beta == state[KL_STATE]["beta"]
    metrics = {KL_METRIC: 0.0, "actor/reward_kl_penalty_coeff": moved.beta}
    move_kl_weight(config, state, key(1, inner=1), metrics, 16)  # cut at -0.2
    assert state[KL_STATE]["beta"] == pytest.approx(0.5 * 1.016 * 0.968)


def test_a_fixed_weight_stays_and_none_is_none():
    fixed = load_config("grpo-tiny", ADAPTIVE[:1])
    state: dict = {}
    move_kl_weight(fixed, state, key(1), {KL_METRIC: 9.0}, 16)
    assert state == {} and kl_penalty(load_config("grpo-tiny"), state) is None
    penalty = kl_penalty(fixed, state)
    assert penalty is not None and penalty.beta == 0.001
