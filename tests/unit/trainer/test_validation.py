"""What validation reports: worked out by hand; a failed session is wrong but has no reward."""

import itertools
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.testing.ledger import failed_session, good_session, prompt_spec
from rlcore.trainer.validation import (
    answers_of,
    base_accuracies,
    generations_path,
    write_generations,
)
from rlcore.trainer.validation_metrics import (
    best_at_k,
    majority_at_k,
    numbers_of_sessions,
    pass_at_k,
    validation_metrics,
)


def spec(uid, source="sums", **changes):
    return prompt_spec(uid, fields={"data_source": source}, **changes)


def right(uid, reward=1.0):
    return [good_session(uid, 0, reward=reward, reward_extra={"acc": 1.0})]


def wrong(uid, reward=0.0):
    return [good_session(uid, 0, reward=reward, reward_extra={"acc": 0.0})]


def group(uid, *accuracies, preds=None):
    """Return sessions with these accuracies; None is a session that failed."""
    return [
        failed_session(i)
        if acc is None
        else good_session(
            uid, i, reward=acc, num_turns=2 + i,
            reward_extra={"acc": acc, **({"pred": preds[i]} if preds else {})},
        )
        for i, acc in enumerate(accuracies)
    ]  # fmt: skip


def test_accuracy_per_source_and_over_all_with_its_standard_error():
    specs = [spec("a"), spec("b"), spec("c"), spec("d", "words")]
    settled = {"a": right("a"), "b": wrong("b", 0.5), "c": wrong("c"), "d": right("d")}
    metrics = validation_metrics(specs, settled)
    assert metrics["val-core/sums/acc/mean@1"] == pytest.approx(1 / 3)
    assert metrics["val-core/words/acc/mean@1"] == 1.0
    assert metrics["val-aux/sums/reward/mean@1"] == pytest.approx(0.5)  # (1 + 0.5 + 0) / 3
    assert metrics["val-aux/accuracy"] == pytest.approx(0.5)  # 2 of 4
    # sqrt(p (1 - p) / n) = sqrt(0.25 / 4)
    assert metrics["val-aux/accuracy_stderr"] == pytest.approx(0.25)
    assert metrics["val-aux/num_prompts"] == 4
    # With one session per prompt there is nothing to choose from.
    assert not any("pass@" in name or "best@" in name or "maj@" in name for name in metrics)


def test_a_failed_session_counts_as_wrong_and_is_in_no_mean_of_rewards():
    specs = [spec("a"), spec("b")]
    metrics = validation_metrics(specs, {"a": right("a"), "b": [failed_session(0)]})
    assert metrics["val-aux/accuracy"] == pytest.approx(0.5)
    assert metrics["val-aux/sums/reward/mean@1"] == 1.0
    assert metrics["val-aux/failed_sessions"] == 1


def test_several_sessions_give_pass_best_and_majority_per_source():
    preds = ["7", "7", "8", None]
    settled = {
        "a": group("a", 1.0, 1.0, 0.0, 0.0, preds=preds),
        "b": group("b", 0.0, 0.0, 0.0, None, preds=["1", "2", "1", None]),
    }
    metrics = validation_metrics([spec("a"), spec("b")], settled)
    assert metrics["val-core/sums/acc/mean@4"] == pytest.approx(0.25)  # (2/4 + 0/4) / 2
    # a: 1 - C(2,2)/C(4,2) = 5/6 and 1; b: 0
    assert metrics["val-aux/sums/acc/pass@2"] == pytest.approx(5 / 12)
    assert metrics["val-core/sums/acc/pass@4"] == pytest.approx(0.5)
    assert metrics["val-core/sums/acc/best@4"] == pytest.approx(0.5)
    # All four: 7 has two votes of a; the two 1s of b are wrong.
    assert metrics["val-core/sums/acc/maj@4"] == pytest.approx(0.5)
    # Pairs of a: 77 wins with 1; 78 twice and 7- twice go to the first, 7; 8- gives 8, wrong: 5/6.
    assert metrics["val-aux/sums/acc/maj@2"] == pytest.approx(5 / 12)
    assert metrics["val-aux/failed_sessions"] == 1
    assert metrics["val-aux/num_turns/max"] == 5
    assert metrics["val-aux/num_turns/mean"] == pytest.approx((2 + 3 + 4 + 5 + 2 + 3 + 4) / 7)


def test_majority_needs_answers():
    metrics = validation_metrics([spec("a")], {"a": group("a", 1.0, 0.0)})
    assert "val-core/sums/acc/pass@2" in metrics
    assert not any("maj@" in name for name in metrics)


def test_rows_that_say_how_an_answer_is_found_have_majorities():
    extra = {"data_source": "sums", "extra_info": {"extraction": "last_integer"}}
    specs = [prompt_spec("a", fields=extra), prompt_spec("b", fields=extra)]
    settled = {"a": group("a", 1.0, 0.0, 1.0), "b": group("b", 0.0, None, None)}
    texts = {"a_0_0": "It is 7.", "a_1_0": "8", "a_2_0": "7", "b_0_0": "no idea"}
    answers = answers_of(specs, settled, texts)
    assert answers == {"a_0_0": "7", "a_1_0": "8", "a_2_0": "7", "b_0_0": None}
    metrics = validation_metrics(specs, settled, None, answers)
    assert metrics["val-core/sums/acc/maj@3"] == pytest.approx(0.5)  # 7 is right, b has no answer
    # Rows without `extraction` have no known answers.
    plain = [prompt_spec("a"), prompt_spec("b")]
    assert answers_of(plain, settled, texts) == {}


def test_a_vote_for_nothing_can_win():
    assert majority_at_k([("7", 1.0), (None, 0.0), (None, 0.0)], 3) == 0.0


accuracies = st.lists(st.floats(0, 1), min_size=1, max_size=7)


@settings(deadline=None)
@given(accuracies, st.data())
def test_best_is_the_mean_over_all_choices(values, data):
    k = data.draw(st.integers(1, len(values)))
    choices = list(itertools.combinations(values, k))
    assert best_at_k(values, k) == pytest.approx(sum(map(max, choices)) / len(choices))
    solved = [float(value > 0.5) for value in values]
    assert pass_at_k(len(values), int(sum(solved)), k) == pytest.approx(best_at_k(solved, k))


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=6))
def test_majority_of_one_is_the_mean_and_of_all_is_one_answers(votes):
    votes = [(answer, float(ok)) for answer, ok in votes]
    assert majority_at_k(votes, 1) == pytest.approx(sum(acc for _, acc in votes) / len(votes))
    assert majority_at_k(votes, len(votes)) in {acc for _, acc in votes}


def test_many_choices_are_drawn_and_the_same_each_time():
    votes = [("right", 1.0)] * 24 + [("wrong", 0.0)] * 8  # C(32, 8) is over 10 million
    drawn = majority_at_k(votes, 8)
    assert drawn == majority_at_k(votes, 8)
    # Hypergeometric: at least 5 of 8 right, or 4 where "right", which stands first, wins the tie.
    chances = [
        math.comb(24, right) * math.comb(8, 8 - right) / math.comb(32, 8) for right in range(4, 9)
    ]
    assert drawn == pytest.approx(sum(chances), abs=0.02)


def test_powers_of_two_and_all_sessions_are_reported():
    assert [numbers_of_sessions(n) for n in (1, 2, 4, 6)] == [[], [2], [2, 4], [2, 4, 6]]


def test_a_later_validation_is_compared_with_the_base_prompt_by_prompt(tmp_path):
    specs = [spec(uid, index=i) for i, uid in enumerate("abcd")]
    before = {"a": wrong("a"), "b": right("b"), "c": wrong("c"), "d": [failed_session(0)]}
    texts = {f"{uid}_0_0": f"answer of {uid}" for uid in "abcd"}
    write_generations(tmp_path, 0, specs, before, texts)
    base = base_accuracies(tmp_path)
    assert sorted(base.values()) == [0.0, 0.0, 0.0, 1.0]
    after = {"a": right("a"), "b": wrong("b"), "c": right("c"), "d": right("d")}
    # Other uids, as each validation has its own.
    renamed = [spec(f"{uid}2", index=i, raw_prompt=s.raw_prompt)
               for i, (uid, s) in enumerate(zip("abcd", specs, strict=True))]  # fmt: skip
    settled = {f"{uid}2": records for uid, records in after.items()}
    metrics = validation_metrics(renamed, settled, base)
    # Differences 1, -1, 1, 1: mean 0.5, variance 0.75, standard error sqrt(0.75 / 4).
    assert metrics["val-aux/gain_over_base"] == pytest.approx(0.5)
    assert metrics["val-aux/gain_over_base_stderr"] == pytest.approx(math.sqrt(0.75 / 4))
    assert metrics["val-aux/better_than_base"] == 3
    assert metrics["val-aux/worse_than_base"] == 1
    assert metrics["val-aux/sums/acc/gain_over_base"] == pytest.approx(0.5)


def test_without_a_first_validation_nothing_is_compared(tmp_path):
    assert base_accuracies(tmp_path) == {}
    metrics = validation_metrics([spec("a")], {"a": right("a")}, {})
    assert not any("base" in name for name in metrics)


def test_generations_hold_every_session_with_its_error(tmp_path):
    settled = {"a": group("a", 1.0, None)}
    write_generations(tmp_path, 12, [spec("a")], settled, {"a_0_0": "four \N{GRINNING FACE}"})
    lines = generations_path(tmp_path, 12).read_text(encoding="utf-8").splitlines()
    good, failed = map(json.loads, lines)
    assert (good["responses"], good["acc"], good["error"]) == (
        ["four \N{GRINNING FACE}"],
        1.0,
        None,
    )
    assert (failed["responses"], failed["acc"], failed["score"]) == ([], 0.0, None)
    assert failed["error"] == "row 7: ValueError: no"
    assert (failed["session"], failed["step"]) == (1, 12)
