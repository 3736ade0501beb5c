"""Several rows of a session, their weights, and dynamic sampling."""

import pytest
import torch

from rlcore.algorithms import (
    agg_loss,
    dynamic_sampling_keep,
    grpo,
    multi_trajectory,
    rloo,
    session_weights,
)

NAN = float("nan")
# prompt p: session 0 with outputs 1, 0 (in this order), session 1 with one; prompt q: session 0
UIDS = ["p", "q", "p", "p", "q"]
SESSIONS = [0, 0, 1, 0, 1]
INDEX = [1, 0, 0, 0, 0]
SCORES = torch.tensor([4.0, 1.0, 2.0, 100.0, 0.0])
MASK = torch.tensor([[0, 0], [1, 1], [1, 0], [0, 1], [1, 1]])


def test_a_session_counts_once_with_its_last_score():
    # p: 4 and 2, mean 3; q: 1 and 0, mean 0.5; the last output of p/0 is fully masked, and counts
    adv = multi_trajectory(SCORES, UIDS, SESSIONS, INDEX, MASK, "dr_grpo")
    assert adv.tolist() == [[0, 0], [0.5, 0.5], [-1, 0], [0, 1], [-0.5, -0.5]]
    # RLOO of two: the difference
    adv = multi_trajectory(SCORES, UIDS, SESSIONS, torch.tensor(INDEX), MASK, estimator="rloo")
    assert adv.tolist() == [[0, 0], [1, 1], [-2, 0], [0, 2], [-1, -1]]
    # GRPO: +-1 / sqrt(2)
    adv = multi_trajectory(SCORES, UIDS, SESSIONS, INDEX, MASK)
    assert adv[3].tolist() == pytest.approx([0, 0.7071063], abs=1e-6)
    plain = multi_trajectory(SCORES, UIDS, SESSIONS, INDEX, MASK, norm_by_std=False)
    assert plain[3].tolist() == [0, 1]


def test_other_estimators_and_their_arguments():
    adv = multi_trajectory(SCORES, UIDS, SESSIONS, INDEX, MASK, "grpo_passk", norm_by_std=False)
    assert adv.tolist() == [[0, 0], [1, 1], [0, 0], [0, 2], [0, 0]]
    # all four sessions teach: alpha 1; one of them has score 0: alpha 4 / 3
    adv = multi_trajectory(SCORES, UIDS, SESSIONS, INDEX, MASK, "gpg")
    assert adv[1].tolist() == [0.5, 0.5]
    adv = multi_trajectory(SCORES, UIDS, SESSIONS, INDEX, MASK, "gpg", alpha_mode="nonzero_scores")
    assert adv[1, 0].item() == pytest.approx(2 / 3)


def test_single_outputs_are_the_plain_estimator():
    scores, groups = torch.tensor([1.0, 0.0, 3.0, 3.5]), ["a", "a", "b", "b"]
    mask = torch.ones(4, 2)
    for name, estimator in (("grpo", grpo), ("rloo", rloo)):
        adv = multi_trajectory(scores, groups, [0, 1, 0, 1], [0, 0, 0, 0], mask, name)
        assert torch.equal(adv, estimator(scores, groups, mask))


def test_an_unscorable_session_and_types():
    scores = torch.tensor([NAN, 5.0, 1.0, 3.0]).double()
    adv = multi_trajectory(
        scores, ["p"] * 4, ["s", "s", "t", "u"], [3, 2, 0, 0], torch.ones(4, 1), "dr_grpo"
    )
    assert adv[:, 0].tolist() == [0, 0, -1, 1] and adv.dtype == torch.float64
    empty = multi_trajectory(torch.zeros(0), [], [], [], torch.zeros(0, 2))
    assert empty.shape == (0, 2)


def test_errors():
    mask = torch.ones(2, 1)
    scores = torch.zeros(2)
    with pytest.raises(ValueError, match=r"session 's' of prompt 'p' has output indices \[1, 1\]"):
        multi_trajectory(scores, ["p", "p"], ["s", "s"], [1, 1], mask)
    with pytest.raises(ValueError, match="1 output indices for 2 rows"):
        multi_trajectory(scores, ["p", "p"], ["s", "t"], [1], mask)
    with pytest.raises(ValueError, match="1 uids for 2 rows"):
        multi_trajectory(scores, ["p"], ["s", "t"], [1, 1], mask)
    with pytest.raises(ValueError, match="3 sessions for 2 rows"):
        multi_trajectory(scores, ["p", "p"], ["s", "t", "u"], [1, 1], mask)
    with pytest.raises((ValueError, TypeError), match=r"unknown estimator|[Tt]ype-check"):
        multi_trajectory(scores, ["p", "p"], ["s", "t"], [1, 1], mask, "opo")


def test_session_weights_make_sessions_equal():
    # non-empty rows: q0, p1, p0 (its second row), q1; sessions of p: 0 with one non-empty row
    weights = session_weights(UIDS, SESSIONS, MASK)
    assert weights.tolist() == [[0, 0], [1, 1], [1, 0], [0, 1], [1, 1]]
    # two sessions, one of two rows: 3 rows / 2 sessions, halved for the pair
    mask = torch.tensor([[1], [1], [1], [0]])
    weights = session_weights(["p"] * 4, [0, 0, 1, 2], mask)
    assert weights[:, 0].tolist() == [0.75, 0.75, 1.5, 0]
    losses = torch.tensor([[2.0], [4.0], [5.0], [NAN]])
    # (mean(2, 4) + 5) / 2
    assert agg_loss(losses * weights, mask, "seq-mean-token-mean").item() == 4
    assert session_weights(["p"], [0], torch.zeros(1, 2)).tolist() == [[0, 0]]


def test_dynamic_sampling_by_hand():
    scores = torch.tensor([1.0, 0.0, 0.1, 0.1, 0.1, 5.0, NAN, 1.0, NAN, 2.0, 3.0])
    groups = ["a", "a", "b", "b", "b", "c", "d", "d", "e", "e", "e"]
    keep = dynamic_sampling_keep(scores, groups)
    # a differs, b is equal, c is alone, d has one score, e has two that differ
    assert keep.tolist() == [True] * 2 + [False] * 6 + [True] * 3
    assert keep.dtype == torch.bool
    assert dynamic_sampling_keep(torch.zeros(0), []).tolist() == []
    with pytest.raises(ValueError, match="1 group labels for 2 rows"):
        dynamic_sampling_keep(torch.zeros(2), ["a"])
