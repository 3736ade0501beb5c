"""Masked statistics: values by hand, nothing valid, precision."""

import math

import pytest
import torch

from rlcore.algorithms import masked_mean, masked_sum, masked_var, masked_whiten
from rlcore.algorithms.choices import check_choice
from rlcore.algorithms.masked import checked, constant, is_nonempty, num_valid, row_mean, spread

X = torch.tensor([[1.0, float("nan"), 3.0], [8.0, float("inf"), 1e30]])
MASK = torch.tensor([[1, 0, 1], [1, 0, 0]])


def test_values_by_hand():
    # valid: 1, 3, 8
    assert masked_sum(X, MASK).item() == 12
    assert masked_mean(X, MASK).item() == 4
    # (9 + 1 + 16) / 2 and / 3
    assert masked_var(X, MASK).item() == 13
    assert masked_var(X, MASK, unbiased=False).item() == pytest.approx(26 / 3)


def test_whitening_by_hand():
    # mean 4, variance 13
    white = masked_whiten(X, MASK)
    root = math.sqrt(13)
    assert white[0].tolist() == pytest.approx([-3 / root, 0, -1 / root])
    assert white[1].tolist() == pytest.approx([4 / root, 0, 0])
    # the mean is added back after scaling
    kept = masked_whiten(X, MASK, shift_mean=False)
    assert kept[0].tolist() == pytest.approx([4 - 3 / root, 0, 4 - 1 / root])
    # population variance 26 / 3; an epsilon of 1/3 inside the root makes it 9
    other = masked_whiten(X, MASK, unbiased=False, eps=1 / 3)
    assert other[1, 0].item() == pytest.approx(4 / 3)


def test_whitening_of_constants_and_single_values_is_zero():
    for value in (0.1, 5.0, 1e6):
        white = masked_whiten(torch.full((3, 7), value), torch.ones(3, 7))
        assert white.abs().max().item() < 1e-4
    assert masked_whiten(torch.tensor([[7.0, 9.0]]), torch.tensor([[0, 1]])).tolist() == [[0, 0]]


def test_nothing_valid_is_zero_with_zero_gradient():
    none = torch.zeros(1, 2)
    for statistic in (masked_sum, masked_mean, masked_var, masked_whiten):
        x = torch.tensor([[float("nan"), 2.0]], requires_grad=True)
        value = statistic(x, none)
        assert value.sum().item() == 0
        assert torch.autograd.grad(value.sum(), x)[0].tolist() == [[0, 0]]
    assert masked_var(torch.tensor([[5.0]]), torch.ones(1, 1)).item() == 0
    assert masked_var(torch.tensor([[5.0]]), torch.ones(1, 1), unbiased=False).item() == 0


def test_empty_batches():
    empty = torch.zeros(0, 3)
    assert masked_sum(empty, empty).item() == masked_mean(empty, empty).item() == 0
    assert masked_var(empty, empty).item() == 0
    assert masked_whiten(empty, empty).shape == (0, 3)


def test_low_precision_is_widened_and_float64_kept():
    ones = torch.ones(1, 3000)
    assert masked_sum(ones.bfloat16(), ones).item() == 3000
    assert masked_mean(ones.half(), ones).dtype == torch.float32
    assert masked_whiten(ones.bfloat16(), ones).dtype == torch.float32
    for statistic in (masked_sum, masked_mean, masked_var, masked_whiten):
        assert statistic(ones.double(), ones).dtype == torch.float64


def test_masks_of_any_type():
    for mask in (MASK, MASK.bool(), MASK.float()):
        assert masked_mean(X, mask).item() == 4


def test_rows():
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]])
    x = torch.tensor([[2.0, 9.0, 4.0], [9.0, 9.0, 9.0], [1.0, 2.0, 6.0]])
    assert num_valid(mask).tolist() == [2, 0, 3]
    assert is_nonempty(mask).tolist() == [True, False, True]
    assert row_mean(x, mask).tolist() == [3, 0, 3]
    spread_out = spread(torch.tensor([5.0, 6.0, 7.0]), mask)
    assert spread_out.tolist() == [[5, 0, 5], [0, 0, 0], [7, 7, 7]]


def test_constants_have_no_gradient_and_valid_numbers_must_be_finite():
    x = torch.tensor([[1.0, float("nan")]], requires_grad=True)
    assert not constant(x, torch.tensor([[1, 0]])).requires_grad
    assert checked("value", x, torch.tensor([[1, 0]])).tolist() == [[1, 0]]
    with pytest.raises(ValueError, match=r"value is nan at valid position \(0, 1\)"):
        checked("value", x, torch.ones(1, 2))


def test_names_of_variants():
    check_choice("mode", "one", ("one", "two"))
    with pytest.raises(ValueError, match="unknown mode 'three'; known: one, two"):
        check_choice("mode", "three", ("one", "two"))
