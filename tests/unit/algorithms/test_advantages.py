"""Group advantages: values by hand, groups of one, unscorable rows, labels."""

import math
import uuid

import pytest
import torch

from rlcore.algorithms import (
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_pp_baseline,
    rloo,
)

NAN = float("nan")
ONE = torch.ones(4, 1)
SCORES = torch.tensor([1.0, 0.0, 7.0, 0.0])
GROUPS = ["a", "a", "b", "a"]
BY_GROUP = (grpo, dr_grpo, rloo, opo, gpg, reinforce_pp_baseline)


def column(adv: torch.Tensor) -> list[float]:
    return adv[:, 0].tolist()


def test_grpo_by_hand():
    # group a: 1, 0, 0 -> mean 1/3, Bessel variance (4/9 + 1/9 + 1/9) / 2 = 1/3
    std = math.sqrt(1 / 3)
    adv = grpo(SCORES, GROUPS, ONE)
    assert column(adv) == pytest.approx([2 / 3 / std, -1 / 3 / std, 0, -1 / 3 / std], rel=1e-5)
    # population variance 2/9
    adv = grpo(SCORES, GROUPS, ONE, unbiased=False)
    assert adv[0].item() == pytest.approx(2 / 3 / math.sqrt(2 / 9), rel=1e-5)
    # the epsilon is added to the deviation, not to the variance
    adv = grpo(SCORES, GROUPS, ONE, eps=1.0)
    assert adv[0].item() == pytest.approx(2 / 3 / (std + 1), rel=1e-6)
    assert column(grpo(SCORES, GROUPS, ONE, norm_by_std=False)) == pytest.approx(
        [2 / 3, -1 / 3, 0, -1 / 3]
    )
    # as verl: [1, 0, 0, 0] -> [1.4999970, -0.4999990 x 3]
    adv = grpo(torch.tensor([1.0, 0.0, 0.0, 0.0]), [0] * 4, ONE)
    assert column(adv) == pytest.approx([1.4999970, *[-0.4999990] * 3], abs=1e-6)


def test_batch_level_deviation():
    # scores 0, 2, 0, 4: mean 1.5, squares 2.25 + 0.25 + 2.25 + 6.25 = 11, / 3; NaN is not in it
    scores = torch.tensor([0.0, 2.0, 0.0, 4.0, NAN])
    adv = grpo(scores, [1, 1, 2, 2, 2], torch.ones(5, 1), std_level="batch")
    std = math.sqrt(11 / 3)
    assert column(adv) == pytest.approx([-1 / std, 1 / std, -2 / std, 2 / std, 0], rel=1e-5)


def test_dr_grpo_and_rloo_by_hand():
    assert column(dr_grpo(SCORES, GROUPS, ONE)) == pytest.approx([2 / 3, -1 / 3, 0, -1 / 3])
    # 1 - mean(0, 0); 0 - mean(1, 0)
    assert column(rloo(SCORES, GROUPS, ONE)) == pytest.approx([1, -0.5, 0, -0.5])


def test_passk_by_hand():
    scores, groups = torch.tensor([0.5, 1.0, 0.0, 2.0, 2.0]), ["a", "a", "a", "b", "b"]
    mask = torch.ones(5, 1)
    # best 1.0 - second 0.5, std of 0.5, 1, 0 is 0.5; ties have nothing
    adv = grpo_passk(scores, groups, mask, norm_by_std=False)
    assert column(adv) == [0, 0.5, 0, 0, 0]
    assert grpo_passk(scores, groups, mask)[1].item() == pytest.approx(0.5 / (0.5 + 1e-6))
    assert grpo_passk(scores, groups, mask, eps=0.5)[1].item() == pytest.approx(0.5)
    # best two equal, a third below: nothing either
    adv = grpo_passk(torch.tensor([3.0, 3.0, 0.0]), [0, 0, 0], torch.ones(3, 1))
    assert column(adv) == [0, 0, 0]
    with pytest.raises(ValueError, match="two rows or more in each group; 'b' has one"):
        grpo_passk(SCORES, GROUPS, ONE)
    # an unscorable row leaves one: nothing to compare
    assert column(grpo_passk(torch.tensor([1.0, NAN]), [0, 0], torch.ones(2, 1))) == [0, 0]


def test_opo_by_hand():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0]])
    # lengths 3, 1, 0 in group a: baseline (3 * 1 + 1 * 0 + 0) / 4
    adv = opo(SCORES, GROUPS, mask)
    assert adv.tolist() == [[0.25] * 3, [-0.75, 0, 0], [0] * 3, [0] * 3]
    # lengths 1, 0, 3: baseline 1/4
    for lengths in ([1, 0, 9, 3], torch.tensor([1.0, 0.0, 9.0, 3.0])):
        adv = opo(SCORES, GROUPS, ONE, lengths=lengths)
        assert column(adv) == [0.75, -0.25, 0, -0.25]
    assert column(opo(SCORES, GROUPS, ONE, lengths=[0, 0, 0, 0])) == [0, 0, 0, 0]
    for bad in ([1, 1, 1], [1, 1, 1, -1]):
        with pytest.raises(ValueError, match="lengths must be 4 numbers of at least 0"):
            opo(SCORES, GROUPS, ONE, lengths=bad)


def test_gpg_by_hand():
    # group a teaches: 3 of 4 rows, alpha 4/3
    adv = gpg(SCORES, GROUPS, ONE)
    assert column(adv) == pytest.approx([8 / 9, -4 / 9, 0, -4 / 9])
    # 2 rows have a score: alpha 2
    adv = gpg(SCORES, GROUPS, ONE, alpha_mode="nonzero_scores")
    assert column(adv) == pytest.approx([4 / 3, -2 / 3, 0, -2 / 3])
    adv = gpg(SCORES, GROUPS, ONE, alpha_mode="none", f_norm=2.0)
    assert column(adv) == pytest.approx([1 / 3, -1 / 6, 0, -1 / 6])
    # nothing teaches, nothing scores: the divisor is at least 1
    assert column(gpg(torch.zeros(4), GROUPS, ONE, singleton="raw")) == [0, 0, 0, 0]
    none = gpg(torch.tensor([3.0]), [0], torch.ones(1, 1), singleton="raw")
    assert none.item() == 3
    zeros = torch.tensor([0.0, 0.0, -0.0, 0.0])
    assert column(gpg(zeros, GROUPS, ONE, alpha_mode="nonzero_scores")) == [0, 0, 0, 0]
    # unscorable rows count nowhere: 3 scored, 2 teach; 2 have a score
    partly = torch.tensor([2.0, 0.0, 7.0, NAN])
    assert column(gpg(partly, GROUPS, ONE)) == pytest.approx([1.5, -1.5, 0, 0])
    by_score = gpg(partly, GROUPS, ONE, alpha_mode="nonzero_scores")
    assert column(by_score) == pytest.approx([1.5, -1.5, 0, 0])
    with pytest.raises(ValueError, match="f_norm must not be 0"):
        gpg(SCORES, GROUPS, ONE, f_norm=0.0)


def test_gdpo_by_hand():
    # rewards: [1, 0, 0] and [0, 10, 20]; each normalised in the group before the sum
    matrix = torch.tensor([[1.0, 0.0], [0.0, 10.0], [0.0, 20.0]])
    mask = torch.ones(3, 1)
    std = math.sqrt(1 / 3)
    first = [2 / 3 / std, -1 / 3 / std, -1 / 3 / std]
    second = [-1.0, 0.0, 1.0]
    plain = gdpo(matrix, [0] * 3, mask, batch_norm="none")
    total = [a + b for a, b in zip(first, second, strict=True)]
    assert column(plain) == pytest.approx(total, abs=1e-5)
    weighted = gdpo(matrix, [0] * 3, mask, weights=[0.5, 2.0], batch_norm="none")
    expected = [0.5 * a + 2 * b for a, b in zip(first, second, strict=True)]
    assert column(weighted) == pytest.approx(expected, rel=1e-5)
    # mean 0 over the batch; Bessel
    scale = math.sqrt(sum(value**2 for value in total) / 2)
    sample = gdpo(matrix, [0] * 3, mask)
    assert column(sample) == pytest.approx([value / scale for value in total], abs=1e-5)
    centred = gdpo(matrix, [0] * 3, mask, norm_by_std=False, batch_norm="none")
    assert column(centred) == pytest.approx([2 / 3 - 10, -1 / 3, -1 / 3 + 10], rel=1e-5)
    wide = gdpo(matrix, [0] * 3, mask, eps=1.0, batch_norm="none")
    assert wide[2].item() == pytest.approx(-1 / 3 / (std + 1) + 10 / 11, rel=1e-5)
    with pytest.raises(ValueError, match="1 weights for 2 rewards"):
        gdpo(matrix, [0] * 3, mask, weights=[1.0])


def test_gdpo_normalises_over_rows_or_tokens():
    matrix, groups = torch.tensor([[1.0], [-1.0], [3.0], [1.0]]), [0, 0, 1, 1]
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 0], [0, 0, 0]])
    # centred: 1, -1, 1, -1; three rows vote: mean 1/3, squares 4/9 + 16/9 + 4/9, / 2
    sample = gdpo(matrix, groups, mask, norm_by_std=False, batch_eps=0.0)
    scale = math.sqrt(24 / 9 / 2)
    assert sample[0].tolist() == pytest.approx([2 / 3 / scale] * 3)
    assert sample[1].tolist() == pytest.approx([-4 / 3 / scale, 0, 0])
    # the epsilon is inside the root
    sample = gdpo(matrix, groups, mask, norm_by_std=False, batch_eps=1.0)
    assert sample[1, 0].item() == pytest.approx(-4 / 3 / math.sqrt(24 / 18 + 1))
    # five tokens: 1, 1, 1, -1, 1: mean 0.6, squares 4 * 0.16 + 2.56 = 3.2, / 4
    token = gdpo(matrix, groups, mask, norm_by_std=False, batch_norm="token", batch_eps=0.1)
    assert token[1].tolist() == pytest.approx([-1.6 / math.sqrt(0.9), 0, 0])
    assert token[2, 0].item() == pytest.approx(0.4 / math.sqrt(0.9))


def test_gdpo_unscorable_rows_and_groups_of_one():
    matrix = torch.tensor([[1.0, 5.0], [0.0, 4.0], [NAN, 9.0], [2.0, 2.0]])
    for mode in ("none", "sample", "token"):
        adv = gdpo(matrix, [0, 0, 0, 1], ONE, norm_by_std=False, batch_norm=mode)
        assert adv[2].item() == 0
        # rows 0, 1, 3 without row 2: 1, -1, 0, mean 0, Bessel variance 1
        assert column(adv) == pytest.approx([1, -1, 0, 0], abs=1e-6)
    raw = gdpo(matrix, [0, 0, 0, 1], ONE, batch_norm="none", singleton="raw", norm_by_std=False)
    assert column(raw) == pytest.approx([1, -1, 0, 4])


def test_reinforce_pp_baseline_by_hand():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    # 1, 1, 1, -1: mean 0.5, squares 3 * 0.25 + 2.25 = 3, / 3
    adv = reinforce_pp_baseline(torch.tensor([2.0, 0.0]), [0, 0], mask)
    assert adv[0].tolist() == pytest.approx([0.5] * 3)
    assert adv[1].tolist() == pytest.approx([-1.5, 0, 0])
    plain = reinforce_pp_baseline(torch.tensor([2.0, 0.0]), [0, 0], mask, whiten=False)
    assert plain.tolist() == [[1, 1, 1], [-1, 0, 0]]
    # an unscorable row is not in the whitening
    scores, groups = torch.tensor([2.0, 0.0, NAN]), [0, 0, 0]
    adv = reinforce_pp_baseline(scores, groups, torch.ones(3, 1))
    assert column(adv) == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5), 0])
    equal = reinforce_pp_baseline(torch.full((3,), 0.1), [0, 0, 0], torch.ones(3, 2))
    assert equal.abs().max().item() == 0
    single = reinforce_pp_baseline(torch.tensor([4.0]), [0], torch.ones(1, 1), "raw", False)
    assert single.item() == 4


@pytest.mark.parametrize("estimator", BY_GROUP)
def test_a_group_of_one_is_zero_or_raw(estimator):
    scores, mask = torch.tensor([3.0]), torch.ones(1, 2)
    assert estimator(scores, ["x"], mask).tolist() == [[0, 0]]
    options = {"whiten": False} if estimator is reinforce_pp_baseline else {}
    raw = estimator(scores, ["x"], mask, singleton="raw", **options)
    # GRPO divides what it leaves by 1 + eps
    assert raw[0].tolist() == pytest.approx([3 / (1 + 1e-6 * (estimator is grpo))] * 2, rel=1e-6)


def test_grpo_raw_singletons_are_divided_by_one_plus_eps():
    scores, mask = torch.tensor([3.0]), torch.ones(1, 1)
    assert grpo(scores, [0], mask, singleton="raw", eps=0.5).item() == 2
    assert grpo(scores, [0], mask, singleton="raw", eps=0.5, norm_by_std=False).item() == 3


@pytest.mark.parametrize("estimator", [*BY_GROUP, grpo_passk])
def test_equal_scores_are_exactly_zero(estimator):
    # in float32 seven times 0.1 has a mean that is not 0.1
    adv = estimator(torch.full((7,), 0.1), ["g"] * 7, torch.ones(7, 3))
    assert adv.abs().max().item() == 0


@pytest.mark.parametrize("estimator", [dr_grpo, rloo, opo])
def test_unscorable_rows_are_in_no_statistic(estimator):
    scores = torch.tensor([1.0, NAN, 0.0, NAN])
    adv = estimator(scores, ["a", "a", "a", "b"], ONE)
    factor = 2 if estimator is rloo else 1
    assert column(adv) == [0.5 * factor, 0, -0.5 * factor, 0]


def test_labels_are_compared_as_objects():
    scores = torch.tensor([0.0, 2.0, 1.0, 5.0])
    assert column(dr_grpo(scores, ["1", "1", "01", 10**12], ONE)) == [-1, 1, 0, 0]
    one, two = uuid.uuid4(), uuid.uuid4()
    assert column(dr_grpo(scores, [one, two, one, two], ONE)) == [-0.5, -1.5, 0.5, 1.5]
    assert column(dr_grpo(scores, torch.tensor([-7, 3, -7, 3]), ONE)) == [-0.5, -1.5, 0.5, 1.5]


def test_masked_tokens_have_no_advantage_but_their_rows_count():
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    assert dr_grpo(torch.tensor([2.0, 0.0]), [0, 0], mask).tolist() == [[1, 0, 1], [0, 0, 0]]


def test_types():
    mask = torch.ones(4, 1)
    for estimator in (*BY_GROUP,):
        assert estimator(SCORES.double(), GROUPS, mask).dtype == torch.float64
        assert estimator(SCORES.bfloat16(), GROUPS, mask).dtype == torch.float32
    # large scores that float32 sums cannot tell apart
    scores = torch.tensor([1e8, 1e8 + 8, 1e8 + 16, 1e8 + 24])
    assert column(dr_grpo(scores, [0] * 4, mask)) == [-12, -4, 4, 12]


@pytest.mark.parametrize("estimator", [*BY_GROUP, grpo_passk])
def test_errors(estimator):
    with pytest.raises(ValueError, match="3 group labels for 4 rows"):
        estimator(torch.zeros(4), [0, 0, 0], ONE)
    with pytest.raises(ValueError, match="must be finite or NaN"):
        estimator(torch.tensor([float("inf"), 0.0]), [0, 0], torch.ones(2, 1))


@pytest.mark.parametrize(
    ("estimator", "argument"),
    [(grpo, "std_level"), (grpo, "singleton"), (gpg, "alpha_mode"), (opo, "singleton")],
)
def test_unknown_names(estimator, argument):
    with pytest.raises((ValueError, TypeError), match=rf"unknown {argument}|[Tt]ype-check"):
        estimator(SCORES, GROUPS, ONE, **{argument: "other"})


def test_unknown_batch_norm():
    with pytest.raises((ValueError, TypeError), match=r"unknown batch_norm|[Tt]ype-check"):
        gdpo(torch.zeros(1, 1), [0], torch.ones(1, 1), batch_norm="other")
