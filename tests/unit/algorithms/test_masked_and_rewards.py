"""Masked statistics and the placement of rewards: values by hand, and masks that hide anything."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.algorithms import masked_mean, masked_sum, masked_var, place_outcome_reward

X = torch.tensor([[1.0, float("nan"), 3.0], [8.0, float("inf"), 1e30]])
MASK = torch.tensor([[1, 0, 1], [1, 0, 0]])


def test_values_by_hand():
    # valid: 1, 3, 8
    assert masked_sum(X, MASK).item() == 12
    assert masked_mean(X, MASK).item() == 4
    # (9 + 1 + 16) / 2 and / 3
    assert masked_var(X, MASK).item() == 13
    assert masked_var(X, MASK, unbiased=False).item() == pytest.approx(26 / 3)


def test_nothing_valid_is_zero_with_zero_gradient():
    x = torch.tensor([[float("nan"), 2.0]], requires_grad=True)
    none = torch.zeros(1, 2)
    for statistic in (masked_sum, masked_mean, masked_var):
        value = statistic(x, none)
        assert value.item() == 0
        assert torch.autograd.grad(value, x, retain_graph=True)[0].tolist() == [[0, 0]]
    assert masked_var(torch.tensor([[5.0]]), torch.ones(1, 1)).item() == 0


def test_low_precision_is_widened_and_float64_kept():
    ones = torch.ones(1, 3000)
    assert masked_sum(ones.bfloat16(), ones).item() == 3000
    assert masked_sum(ones.double(), ones).dtype == torch.float64


@settings(deadline=None)
@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=8), st.integers(0, 255))
def test_hidden_values_do_not_matter(values: list[float], bits: int):
    x = torch.tensor([values])
    mask = torch.tensor([[bits >> i & 1 for i in range(len(values))]])
    garbage = torch.where(mask.bool(), x, torch.tensor(float("nan")))
    for statistic in (masked_sum, masked_mean, masked_var):
        assert torch.equal(statistic(x, mask), statistic(garbage, mask))


def test_reward_lies_at_the_last_valid_token():
    mask = torch.tensor([[1, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    placed = place_outcome_reward(torch.tensor([2.0, -1.0, 5.0]), mask)
    assert placed.tolist() == [[0, 0, 0, 2, 0, 0], [-1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]]
