import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.errors import DataError
from rlcore.retraining.gate import compare, sign_test


def test_the_sign_test_by_hand():
    # n = 5: P(X >= 4) = (5 + 1) / 32; P(X >= 5) = 1 / 32.
    assert sign_test(4, 1) == 6 / 32
    assert sign_test(5, 0) == 1 / 32
    assert sign_test(0, 3) == 1
    assert sign_test(0, 0) == 1


@given(st.integers(0, 60), st.integers(0, 60))
def test_the_sign_test_counts_every_outcome_once(wins, losses):
    # With n = wins + losses fixed: P(X >= w) + P(X <= w - 1) = 1, and P(X <= w - 1) is, by
    # symmetry, P(X >= n - w + 1) = P(X >= losses + 1).
    if wins:
        assert sign_test(wins, losses) + sign_test(losses + 1, wins - 1) == pytest.approx(1)
    assert 0 < sign_test(wins, losses) <= 1


def outcomes(*values):
    return {str(index): float(value) for index, value in enumerate(values)}


def judged(candidate, other, min_gain=0.0, alpha=0.05):
    return compare(candidate, other, against="base", min_gain=min_gain, alpha=alpha)


def test_a_clear_gain_passes_and_says_so():
    found = judged(outcomes(*[1] * 8, 0, 0), outcomes(*[0] * 7, 1, 0, 0))
    # 7 better, 0 worse: p = 1/128; means 0.8 and 0.1.
    assert (found.wins, found.losses, found.p_value) == (7, 0, 1 / 128)
    assert found.gain == pytest.approx(0.7)
    assert found.passes
    assert "7 better, 0 worse, p = 0.00781: passes" in found.line()


def test_a_gain_by_chance_or_below_the_minimum_does_not_pass():
    by_chance = judged(outcomes(1, 1, 1, 1, 0), outcomes(0, 0, 0, 0, 0))
    assert by_chance.p_value == 1 / 16
    assert not by_chance.passes
    small = judged(outcomes(*[1] * 8, *[0] * 92), outcomes(*[0] * 100), min_gain=0.1)
    assert small.p_value < 0.01
    assert not small.passes


def test_equal_and_worse_models_do_not_pass():
    same = outcomes(1, 0, 1)
    assert not judged(same, same).passes
    assert judged(same, same).p_value == 1
    assert not judged(outcomes(*[0] * 8), outcomes(*[1] * 8)).passes


def test_graded_outcomes_are_compared_by_which_is_higher():
    found = judged(outcomes(0.5, 0.2, 0.9), outcomes(0.4, 0.3, 0.9))
    assert (found.wins, found.losses) == (1, 1)


def test_models_that_answered_other_prompts_are_not_compared():
    with pytest.raises(DataError, match="2 and 3 prompts, 1 of them"):
        judged(outcomes(1, 1), outcomes(1, 1, 1))
    with pytest.raises(DataError, match="paired"):
        judged({}, {})
