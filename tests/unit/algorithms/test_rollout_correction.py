"""Importance weights, rejection, the off-policy mask and the correction of a batch, by hand."""

import math

import pytest
import torch

from rlcore.algorithms import (
    correct_rollout,
    off_policy_sequence_mask,
    rejection_mask,
    rollout_is_weights,
)

NAN = float("nan")
LN2 = math.log(2)
# log ratios: ln 2, ln 4; -ln 2; nothing
TRAIN = torch.tensor([[LN2, 2 * LN2, NAN], [-LN2, NAN, NAN], [NAN, NAN, NAN]])
ROLLOUT = torch.tensor([[0.0, 0.0, NAN], [0.0, NAN, NAN], [NAN, NAN, NAN]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])


def weights(**kw):
    return rollout_is_weights(TRAIN, ROLLOUT, MASK, **kw).flatten().tolist()


def kept(**kw):
    return rejection_mask(TRAIN, ROLLOUT, MASK, **kw).tolist()


def test_truncated_weights_by_hand():
    assert weights() == pytest.approx([2, 2, 0, 0.5, 0, 0, 0, 0, 0])
    assert weights(upper=3) == pytest.approx([2, 3, 0, 0.5, 0, 0, 0, 0, 0])
    assert weights(lower=1.0, upper=8.0) == pytest.approx([2, 4, 0, 1, 0, 0, 0, 0, 0])
    # product 8, geometric mean sqrt 8
    assert weights(level="sequence", upper=5)[:4] == pytest.approx([5, 5, 0, 0.5])
    assert weights(level="sequence", upper=9)[:4] == pytest.approx([8, 8, 0, 0.5])
    assert weights(level="geometric", upper=9)[:4] == pytest.approx([8**0.5, 8**0.5, 0, 0.5])


def test_masked_weights_by_hand():
    assert weights(mode="mask", upper=3)[:4] == pytest.approx([2, 0, 0, 0.5])
    assert weights(mode="mask", lower=1, upper=5)[:4] == pytest.approx([2, 4, 0, 0])
    assert weights(mode="mask", level="sequence", lower=0.5, upper=5)[:4] == [0, 0, 0, 0.5]


def test_normalised_weights_by_hand():
    # token: mean (2 + 4 + 0.5) / 3
    mean = 6.5 / 3
    found = weights(upper=9, batch_normalize=True)
    assert found[:4] == pytest.approx([2 / mean, 4 / mean, 0, 0.5 / mean])
    # sequence: one vote per non-empty row, (8 + 0.5) / 2
    found = weights(level="sequence", upper=9, batch_normalize=True)
    assert found[:4] == pytest.approx([8 / 4.25, 8 / 4.25, 0, 0.5 / 4.25])
    # all weights 0: nothing to divide by
    assert weights(mode="mask", upper=0.1, batch_normalize=True) == [0] * 9
    # a mean of exactly 1e-8 or less is left alone
    far = torch.full((1, 1), -20.0, dtype=torch.float64)
    one = torch.ones(1, 1)
    found = rollout_is_weights(far, 0 * far, one, batch_normalize=True)
    assert found.item() == pytest.approx(math.exp(-20))


def test_weights_are_bounded_before_exp():
    d, one = torch.tensor([[1e4, -1e4]]).double(), torch.ones(1, 2)
    found = rollout_is_weights(d, 0 * d, one, upper=1e30)
    assert found[0].tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    sequence = torch.full((1, 3), 15.0).double()
    found = rollout_is_weights(sequence, 0 * sequence, torch.ones(1, 3), "sequence", upper=1e30)
    assert found[0].tolist() == pytest.approx([math.exp(20)] * 3)


def test_weights_are_constant_and_their_errors():
    one = torch.ones(1, 1, requires_grad=True)
    assert not rollout_is_weights(one, one, one).requires_grad
    with pytest.raises(ValueError, match=r"upper 1.0 must not be below lower 2.0"):
        weights(lower=2.0, upper=1.0)
    assert weights(lower=2.0, upper=2.0)[3] == 2
    with pytest.raises(ValueError, match=r"training log-prob is nan at valid position \(0, 2\)"):
        rollout_is_weights(TRAIN, ROLLOUT, torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"rollout log-prob is nan at valid position \(0, 2\)"):
        rollout_is_weights(TRAIN.nan_to_num(), ROLLOUT, torch.ones(3, 3))
    for argument in ("level", "mode"):
        with pytest.raises((ValueError, TypeError), match=rf"unknown {argument}|[Tt]ype-check"):
            weights(**{argument: "other"})


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        # ratios 2, 4; 0.5
        ({"level": "token", "lower": 0.6, "upper": 3.0}, [[1, 0, 0], [0, 0, 0]]),
        ({"level": "token", "lower": 0.4}, [[1, 1, 0], [1, 0, 0]]),
        ({"level": "token", "upper": 1.4}, [[0, 0, 0], [1, 0, 0]]),
        # products 8; 0.5
        ({"level": "seq_sum", "upper": 7.0}, [[0, 0, 0], [1, 0, 0]]),
        ({"level": "seq_sum", "upper": 9.0, "lower": 0.6}, [[1, 1, 0], [0, 0, 0]]),
        # geometric means 2.83; 0.5
        ({"level": "seq_mean", "upper": 2.9, "lower": 0.6}, [[1, 1, 0], [0, 0, 0]]),
        ({"level": "seq_mean", "upper": 2.8}, [[0, 0, 0], [1, 0, 0]]),
        # any token outside
        ({"level": "seq_max", "upper": 3.0}, [[0, 0, 0], [1, 0, 0]]),
        ({"level": "seq_max", "lower": 0.6}, [[1, 1, 0], [0, 0, 0]]),
        ({}, [[1, 1, 0], [1, 0, 0]]),
    ],
)
def test_rejection_by_ratio(bounds, expected):
    assert kept(**bounds) == [*expected, [0, 0, 0]]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        # k2: 0.24, 0.96; 0.24
        ({"stat": "k2", "level": "token", "upper": 0.5}, [[1, 0, 0], [1, 0, 0]]),
        ({"stat": "k2", "level": "seq_sum", "upper": 1.1}, [[0, 0, 0], [1, 0, 0]]),
        ({"stat": "k2", "level": "seq_sum", "upper": 1.3}, [[1, 1, 0], [1, 0, 0]]),
        ({"stat": "k2", "level": "seq_mean", "upper": 0.5}, [[0, 0, 0], [1, 0, 0]]),
        ({"stat": "k2", "level": "seq_mean", "upper": 0.7}, [[1, 1, 0], [1, 0, 0]]),
        ({"stat": "k2", "level": "seq_max", "upper": 0.5}, [[0, 0, 0], [1, 0, 0]]),
        ({"stat": "k2", "level": "seq_max", "upper": 1.0}, [[1, 1, 0], [1, 0, 0]]),
        # k3 = exp(d) - 1 - d: 0.307, 1.614; 0.193
        ({"stat": "k3", "level": "token", "upper": 0.25}, [[0, 0, 0], [1, 0, 0]]),
        ({"stat": "k3", "level": "token", "upper": 0.31}, [[1, 0, 0], [1, 0, 0]]),
        ({"stat": "k3", "level": "seq_sum", "upper": 1.9}, [[0, 0, 0], [1, 0, 0]]),
        ({"stat": "k3", "level": "seq_sum", "upper": 1.95}, [[1, 1, 0], [1, 0, 0]]),
        ({"stat": "k3", "level": "seq_mean", "upper": 0.97}, [[1, 1, 0], [1, 0, 0]]),
        ({"stat": "k3", "level": "seq_max", "upper": 1.5}, [[0, 0, 0], [1, 0, 0]]),
        ({"stat": "k3", "level": "token", "upper": 0.1}, [[0, 0, 0], [0, 0, 0]]),
    ],
)
def test_rejection_by_divergence(bounds, expected):
    assert kept(**bounds) == [*expected, [0, 0, 0]]


def test_bounds_are_inclusive():
    zero, one = torch.zeros(1, 2), torch.ones(1, 2)
    for level in ("token", "seq_sum", "seq_mean", "seq_max"):
        for stat, upper in (("ratio", 1.0), ("k2", 0.0), ("k3", 0.0)):
            found = rejection_mask(zero, zero, one, stat, level, upper=upper)
            assert found.tolist() == [[1, 1]]
        assert rejection_mask(zero, zero, one, level=level, lower=1.0).tolist() == [[1, 1]]


def test_rejection_takes_log_ratios_as_at_most_20():
    d, one = torch.tensor([[100.0, -30.0]]).double(), torch.ones(1, 2)
    # 20 - 20 = 0: the product is 1
    found = rejection_mask(d, 0 * d, one, level="seq_sum", lower=0.99, upper=1.01)
    assert found.tolist() == [[1, 1]]


def test_the_masks_type_is_kept_and_errors():
    for mask in (MASK, MASK.bool(), MASK.float()):
        found = rejection_mask(TRAIN, ROLLOUT, mask, upper=3.0)
        assert found.dtype == mask.dtype and found.sum().item() == 2
    for stat in ("k2", "k3"):
        with pytest.raises(ValueError, match=f"{stat} has no lower bound, is 0.5"):
            kept(stat=stat, lower=0.5)
    for argument in ("stat", "level"):
        with pytest.raises((ValueError, TypeError), match=rf"unknown {argument}|[Tt]ype-check"):
            kept(**{argument: "other"})


def test_off_policy_sequence_mask_by_hand():
    old = torch.tensor([[0.0, 0.0, NAN], [0.0, 0.0, NAN], [0.0, 0.0, NAN]])
    # mean of old - current: 0.5; 0.5; -2
    logp = torch.tensor([[-1.0, 0.0, NAN], [-0.5, -0.5, NAN], [2.0, 2.0, NAN]])
    adv = torch.tensor([[-1.0, 1.0, NAN], [0.0, -1.0, NAN], [-1.0, -1.0, NAN]])
    mask = torch.tensor([[1, 1, 0]] * 3)
    # negative advantages of the first two rows
    found = off_policy_sequence_mask(old, logp, adv, mask, 0.4)
    assert found.tolist() == [[0, 1, 0], [1, 0, 0], [1, 1, 0]]
    # the bound itself is allowed
    assert off_policy_sequence_mask(old, logp, adv, mask, 0.5).tolist() == mask.tolist()
    assert off_policy_sequence_mask(old, logp, adv, mask.bool(), 0.4).dtype == torch.bool
    with pytest.raises(ValueError, match="advantage is nan"):
        off_policy_sequence_mask(old.nan_to_num(), logp.nan_to_num(), adv, torch.ones(3, 3), 1.0)


def test_a_batch_is_corrected():
    correction = correct_rollout(
        TRAIN,
        ROLLOUT,
        MASK,
        weights={"level": "token", "upper": 3.0, "lower": 0.6, "mode": "mask"},
        rejections=[
            {"level": "token", "stat": "ratio", "upper": 3.0},
            {"level": "seq_sum", "stat": "k3", "upper": 0.25},
        ],
    )
    # the first drops ratio 4, the second drops row 0; ratio 0.5 has weight 0
    assert correction.mask.tolist() == [[0, 0, 0], [1, 0, 0], [0, 0, 0]]
    assert correction.is_weights.tolist() == [[0, 0, 0]] * 3
    expected = {
        "rollout_rs_token_ratio_masked_fraction": 1 / 3,
        "rollout_rs_token_ratio_seq_masked_fraction": 0,
        "rollout_rs_seq_sum_k3_masked_fraction": 2 / 3,
        "rollout_rs_seq_sum_k3_seq_masked_fraction": 1 / 2,
        "rollout_rs_masked_fraction": 2 / 3,
        "rollout_rs_seq_masked_fraction": 1 / 2,
        # weights 2, 0, 0 of the original mask
        "rollout_is_mean": 2 / 3,
        "rollout_is_std": math.sqrt(4 / 3),
        "rollout_is_min": 0,
        "rollout_is_max": 2,
        # (2/3)^2 / (4/3)
        "rollout_is_eff_sample_size": 1 / 3,
        "rollout_is_ratio_fraction_high": 1 / 3,
        "rollout_is_ratio_fraction_low": 1 / 3,
    }
    assert correction.metrics == pytest.approx(expected)


def test_parts_of_a_correction():
    nothing = correct_rollout(TRAIN, ROLLOUT, MASK)
    assert torch.equal(nothing.mask, MASK) and nothing.is_weights is None
    assert nothing.metrics == {}
    only = correct_rollout(TRAIN, ROLLOUT, MASK, weights={})
    assert only.is_weights[:, 0].tolist() == pytest.approx([2, 0.5, 0])
    # above 2: one of three
    assert only.metrics["rollout_is_ratio_fraction_high"] == pytest.approx(1 / 3)
    assert only.metrics["rollout_is_ratio_fraction_low"] == 0
    sequence = correct_rollout(TRAIN, ROLLOUT, MASK, weights={"level": "sequence", "upper": 5.0})
    # both tokens of the row whose product is 8
    assert sequence.metrics["rollout_is_ratio_fraction_high"] == pytest.approx(2 / 3)
    # a weight is 0 where a rejection dropped the token
    both = correct_rollout(TRAIN, ROLLOUT, MASK, weights={}, rejections=[{"upper": 3.0}])
    assert both.is_weights.flatten().tolist() == pytest.approx([2, 0, 0, 0.5, 0, 0, 0, 0, 0])
    empty = correct_rollout(
        torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0), {}, [{"upper": 1.0}]
    )
    assert set(empty.metrics.values()) == {0.0}
