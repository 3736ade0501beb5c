"""GRPO and Dr.GRPO: hand-computed values, verl's corner cases, and properties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.algorithms import ADV_ESTIMATORS, dr_grpo, grpo
from rlcore.errors import ConfigError

ONE = torch.ones(4, 1)


def test_values_by_hand():
    # group a: 1, 0, 0 -> mean 1/3, Bessel variance (4/9 + 1/9 + 1/9) / 2 = 1/3
    scores = torch.tensor([1.0, 0.0, 7.0, 0.0])
    adv = grpo(scores, ["a", "a", "b", "a"], ONE)[:, 0]
    std = math.sqrt(1 / 3)
    assert adv.tolist() == pytest.approx([2 / 3 / std, -1 / 3 / std, 0, -1 / 3 / std], rel=1e-5)
    adv = grpo(scores, ["a", "a", "b", "a"], ONE, unbiased=False)[:, 0]
    assert adv[0].item() == pytest.approx(2 / 3 / math.sqrt(2 / 9), rel=1e-5)
    assert dr_grpo(scores, ["a", "a", "b", "a"], ONE)[:, 0].tolist() == pytest.approx(
        [2 / 3, -1 / 3, 0, -1 / 3]
    )


def test_batch_level_deviation():
    # scores 0, 2, 0, 4: mean 1.5, squares 2.25 + 0.25 + 2.25 + 6.25 = 11, / 3
    adv = grpo(torch.tensor([0.0, 2.0, 0.0, 4.0]), [1, 1, 2, 2], ONE, std_level="batch")[:, 0]
    std = math.sqrt(11 / 3)
    assert adv.tolist() == pytest.approx([-1 / std, 1 / std, -2 / std, 2 / std], rel=1e-5)


def test_a_group_of_one_is_zero_or_raw():
    scores, mask = torch.tensor([3.0]), torch.ones(1, 2)
    assert grpo(scores, ["x"], mask).tolist() == [[0, 0]]
    assert dr_grpo(scores, ["x"], mask, singleton="raw").tolist() == [[3, 3]]
    assert grpo(scores, ["x"], mask, singleton="raw")[0, 0].item() == pytest.approx(3, rel=1e-5)


def test_equal_scores_are_exactly_zero():
    scores = torch.full((7,), 0.1)
    assert grpo(scores, ["g"] * 7, torch.ones(7, 3)).abs().max().item() == 0


def test_unscorable_rows_are_in_no_statistic():
    scores = torch.tensor([1.0, float("nan"), 0.0, float("nan")])
    adv = dr_grpo(scores, ["a", "a", "a", "b"], ONE)[:, 0]
    assert adv.tolist() == [0.5, 0, -0.5, 0]


def test_labels_are_compared_as_objects():
    adv = dr_grpo(torch.tensor([0.0, 2.0, 1.0, 5.0]), ["1", "1", "01", 10**12], ONE)[:, 0]
    assert adv.tolist() == [-1, 1, 0, 0]


def test_masked_tokens_have_no_advantage():
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    assert dr_grpo(torch.tensor([2.0, 0.0]), [0, 0], mask).tolist() == [[1, 0, 1], [0, 0, 0]]


def test_errors():
    with pytest.raises(ValueError, match="3 group labels for 4 scores"):
        grpo(torch.zeros(4), [0, 0, 0], ONE)
    assert ADV_ESTIMATORS.get("grpo") is grpo
    with pytest.raises(ConfigError, match="known: grpo"):
        ADV_ESTIMATORS.get("gae")


groups_of_scores = st.lists(
    st.tuples(st.integers(0, 3), st.floats(-10, 10, width=32)), min_size=1, max_size=12
)


@settings(deadline=None)
@given(groups_of_scores, st.randoms())
def test_sums_to_zero_and_follows_its_rows(rows: list[tuple[int, float]], random):
    groups, scores = [g for g, _ in rows], torch.tensor([s for _, s in rows])
    mask = torch.ones(len(rows), 1)
    for estimator in (grpo, dr_grpo):
        adv = estimator(scores, groups, mask)[:, 0]
        for label in set(groups):
            total = sum(a for a, g in zip(adv.tolist(), groups, strict=True) if g == label)
            assert abs(total) < 1e-4
        order = list(range(len(rows)))
        random.shuffle(order)
        permuted = estimator(scores[order], [groups[i] for i in order], mask)[:, 0]
        assert torch.allclose(permuted, adv[order], atol=1e-5)
        wide = estimator(scores.double(), groups, mask)[:, 0]
        assert wide.dtype == torch.float64
        assert torch.allclose(adv.double(), wide, rtol=2e-4, atol=1e-6)
