"""Placement, penalties and the KL controller: values by hand."""

import pytest
import torch

from rlcore.algorithms import (
    adaptive_kl_update,
    kl_in_reward,
    overlong_penalty,
    place_outcome_reward,
)

NAN = float("nan")


def test_reward_lies_at_the_last_valid_token():
    mask = torch.tensor([[1, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    placed = place_outcome_reward(torch.tensor([2.0, -1.0, 5.0]), mask)
    assert placed.tolist() == [[0, 0, 0, 2, 0, 0], [-1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
    assert place_outcome_reward(torch.ones(2).double(), torch.ones(2, 1)).dtype == torch.float64
    assert place_outcome_reward(torch.ones(1).bfloat16(), torch.ones(1, 1)).dtype == torch.float32


def test_overlong_penalty_by_hand():
    lengths = torch.tensor([0, 70, 80, 85, 90, 100, 130])
    # 0 up to 80; (80 - 85) / 20, (80 - 90) / 20, then -1
    expected = [0, 0, 0, -0.25, -0.5, -1, -1]
    assert overlong_penalty(lengths, 100, 20).tolist() == pytest.approx(expected)
    doubled = overlong_penalty(lengths, 100, 20, factor=2.0)
    assert doubled.tolist() == pytest.approx([2 * value for value in expected])
    assert overlong_penalty(lengths.double(), 100, 20).dtype == torch.float64
    assert overlong_penalty(lengths.half(), 100, 20).dtype == torch.float32
    # without a ramp it is a step beyond the limit
    assert overlong_penalty(torch.tensor([100, 101]), 100, 0).tolist() == [0, -1]
    # a ramp over the whole length
    assert overlong_penalty(torch.tensor([50]), 100, 100).item() == -0.5
    for cache in (-1, 101):
        with pytest.raises(ValueError, match=f"between 0 and max_len 100, is {cache}"):
            overlong_penalty(lengths, 100, cache)


def test_kl_in_reward_by_hand():
    mask = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 0]])
    scores = torch.tensor([[0.0, NAN, 1.0], [2.0, NAN, 7.0], [9.0, NAN, NAN]])
    old = torch.tensor([[-1.0, NAN, -2.0], [-1.0, NAN, NAN], [NAN, NAN, NAN]])
    ref = torch.tensor([[-2.0, NAN, -1.5], [-4.0, NAN, NAN], [NAN, NAN, NAN]])
    # k1: 1, -0.5; 3; mean over the two rows: (0.25 + 3) / 2
    rewards, mean_kl = kl_in_reward(scores, old, ref, mask, 0.1)
    assert rewards.flatten().tolist() == pytest.approx([-0.1, 0, 1.05, 1.7, 0, 0, 0, 0, 0])
    assert mean_kl.item() == pytest.approx(1.625)
    # k2: 0.5, 0.125; 4.5
    rewards, mean_kl = kl_in_reward(scores, old, ref, mask, 1.0, kind="k2")
    assert rewards[0].tolist() == pytest.approx([-0.5, 0, 0.875])
    assert mean_kl.item() == pytest.approx((0.3125 + 4.5) / 2)


def test_the_reward_is_constant():
    scores, logp = torch.ones(1, 1, requires_grad=True), torch.zeros(1, 1, requires_grad=True)
    rewards, mean_kl = kl_in_reward(scores, logp, logp, torch.ones(1, 1), 0.1)
    assert not rewards.requires_grad and not mean_kl.requires_grad


def test_adaptive_controller_by_hand():
    # error clipped at 0.2: 0.001 (1 + 0.2 * 256 / 10000)
    assert adaptive_kl_update(0.001, 0.3, 0.1, 10_000, 256) == pytest.approx(0.00100512)
    # 0.11 / 0.1 - 1 = 0.1
    assert adaptive_kl_update(2.0, 0.11, 0.1, 100, 10) == pytest.approx(2 * 1.01)
    # 0.09 / 0.1 - 1 = -0.1; and clipped at -0.2
    assert adaptive_kl_update(2.0, 0.09, 0.1, 100, 10) == pytest.approx(2 * 0.99)
    assert adaptive_kl_update(2.0, 0.0, 0.1, 100, 10) == pytest.approx(2 * 0.98)
    assert adaptive_kl_update(2.0, torch.tensor(0.1), 0.1, 100, 10) == pytest.approx(2.0)
    for target, horizon in ((0.0, 1.0), (1.0, 0.0)):
        with pytest.raises(ValueError, match=f"above 0, are {target} and {horizon}"):
            adaptive_kl_update(1.0, 0.1, target, horizon, 1)
