"""GAE, ReMax, REINFORCE++: values by hand, tool spans, bootstrap."""

import math

import pytest
import torch

from rlcore.algorithms import gae, reinforce_pp, remax

NAN = float("nan")
REWARDS = torch.tensor([[1.0, NAN, 2.0], [0.0, 4.0, NAN]])
VALUES = torch.tensor([[0.5, NAN, 1.0], [1.0, 2.0, NAN]])
MASK = torch.tensor([[1, 0, 1], [1, 1, 0]])


def test_gae_by_hand():
    # row 0: last token: 2 + 0 - 1 = 1; first: 1 + 0.5 * 1 - 0.5 = 1, A = 1 + 0.5 * 0.5 * 1 = 1.25
    # row 1: last token: 4 - 2 = 2; first: 0 + 0.5 * 2 - 1 = 0, A = 0 + 0.25 * 2 = 0.5
    adv, returns = gae(REWARDS, VALUES, MASK, gamma=0.5, lam=0.5)
    assert adv.tolist() == [[1.25, 0, 1], [0.5, 2, 0]]
    assert returns.tolist() == [[1.75, 0, 2], [1.5, 4, 0]]


def test_gae_defaults_are_the_monte_carlo_return():
    adv, returns = gae(REWARDS, VALUES, MASK)
    assert returns.tolist() == [[3, 0, 2], [4, 4, 0]]
    assert adv.tolist() == [[2.5, 0, 1], [3, 2, 0]]


def test_gae_bootstraps_rows_that_were_cut():
    # row 0: last: 2 + 0.5 * 4 - 1 = 3; first: 1 + 0.5 * 1 - 0.5 = 1, A = 1 + 0.25 * 3
    # a row without valid tokens never reads its bootstrap value
    rewards = torch.cat([REWARDS, torch.full((1, 3), NAN)])
    values = torch.cat([VALUES, torch.full((1, 3), NAN)])
    mask = torch.cat([MASK, torch.zeros(1, 3).long()])
    bootstrap = torch.tensor([4.0, 0.0, NAN])
    adv, returns = gae(rewards, values, mask, 0.5, 0.5, bootstrap_values=bootstrap)
    assert adv.tolist() == [[1.75, 0, 3], [0.5, 2, 0], [0, 0, 0]]
    assert returns[0].tolist() == [2.25, 0, 4]
    with pytest.raises(ValueError, match=r"bootstrap value is inf at valid position \(0,\)"):
        gae(rewards, values, mask, bootstrap_values=torch.tensor([float("inf"), 0.0, 0.0]))


def test_gae_whitens_the_advantages_only():
    # advantages 2.5, 1, 3, 2: mean 2.125, squares .140625 + 1.265625 + .765625 + .015625, / 3
    adv, returns = gae(REWARDS, VALUES, MASK, whiten=True)
    std = math.sqrt(2.1875 / 3)
    assert adv[0].tolist() == pytest.approx([0.375 / std, 0, -1.125 / std])
    assert returns.tolist() == [[3, 0, 2], [4, 4, 0]]


def test_gae_skips_long_tool_spans():
    # values 1, 2; five tool tokens between change nothing
    rewards, values = torch.full((1, 7), NAN), torch.full((1, 7), NAN)
    rewards[0, 0], rewards[0, 6], values[0, 0], values[0, 6] = 0.0, 1.0, 1.0, 2.0
    mask = torch.tensor([[1, 0, 0, 0, 0, 0, 1]])
    adv, _ = gae(rewards, values, mask, gamma=0.9, lam=0.5)
    dense, _ = gae(rewards[:, [0, 6]], values[:, [0, 6]], mask[:, [0, 6]], gamma=0.9, lam=0.5)
    # -1 for the last; 0.9 * 2 - 1 + 0.45 * -1
    assert dense[0].tolist() == pytest.approx([0.35, -1])
    assert adv[0, [0, 6]].tolist() == dense[0].tolist()
    assert adv[0, 1:6].tolist() == [0] * 5


def test_remax_by_hand():
    adv, returns = remax(REWARDS, torch.tensor([0.5, 10.0]), MASK)
    assert returns.tolist() == [[3, 0, 2], [4, 4, 0]]
    assert adv.tolist() == [[2.5, 0, 1.5], [-6, -6, 0]]
    with pytest.raises(ValueError, match=r"baseline is nan at valid position \(1,\)"):
        remax(REWARDS, torch.tensor([0.5, NAN]), MASK)


def test_reinforce_pp_by_hand():
    # row 0: 1 + 0.5 * 2, over the tool token without discount; row 1: 0.5 * 4
    adv, returns = reinforce_pp(REWARDS, MASK, gamma=0.5, whiten=False)
    assert returns.tolist() == adv.tolist() == [[2, 0, 2], [2, 4, 0]]
    # mean 2.5, squares 3 * 0.25 + 2.25 = 3, / 3
    adv, returns = reinforce_pp(REWARDS, MASK, gamma=0.5)
    assert adv[1].tolist() == pytest.approx([-0.5, 1.5, 0])
    assert returns[1].tolist() == [2, 4, 0]
    assert reinforce_pp(REWARDS, MASK)[1][0].tolist() == [3, 0, 2]


def test_valid_numbers_must_be_finite():
    mask = torch.ones(2, 3)
    for call in (
        lambda: gae(REWARDS, VALUES.nan_to_num(), mask),
        lambda: remax(REWARDS, torch.zeros(2), mask),
        lambda: reinforce_pp(REWARDS, mask),
    ):
        with pytest.raises(ValueError, match=r"token reward is nan at valid position \(0, 1\)"):
            call()
    with pytest.raises(ValueError, match=r"value is nan at valid position \(0, 1\)"):
        gae(REWARDS.nan_to_num(), VALUES, mask)


def test_empty_batches():
    for shape in ((0, 3), (2, 0)):
        empty = torch.zeros(shape)
        bootstrap = torch.ones(shape[0])
        for pair in (
            gae(empty, empty, empty, whiten=True, bootstrap_values=bootstrap),
            remax(empty, bootstrap, empty),
            reinforce_pp(empty, empty),
        ):
            assert [part.shape for part in pair] == [shape, shape]
