import json

import pytest

from rlcore.errors import ConfigError, DataError
from rlcore.reward.function import rule_by_data_source
from rlcore.reward.rules import find_rule, letters_rule

ENTRY = {"question": "5 - 8 =", "answer": "-3", "metadata": {"source_dataset": "chain_sum"}}
EXTRA = {"entry": json.dumps(ENTRY), "extraction": "last_integer"}


def score(text, extra=EXTRA, source="reasoning_gym/chain_sum"):
    return rule_by_data_source(source, text, "-3", extra)


def test_the_answer_is_taken_out_before_the_verifier_judges():
    assert score("-3") == {"score": 1.0, "acc": 1.0}
    # reasoning-gym's own scorer gives this sentence 0.07.
    assert score("The answer is -3.") == {"score": 1.0, "acc": 1.0}
    assert score("5 - 8 = 3") == {"score": 0.0, "acc": 0.0}
    assert score("-3 or 4") == {"score": 0.0, "acc": 0.0}
    assert score("no idea") == {"score": 0.0, "acc": 0.0}
    assert score("") == {"score": 0.0, "acc": 0.0}


def test_part_marks_of_the_verifier_do_not_count():
    # "stripped" hands the whole sentence to the verifier, which gives it a part of 1.
    assert score("The answer is -3.", {**EXTRA, "extraction": "stripped"})["score"] == 0.0
    assert score(" -3 ", {**EXTRA, "extraction": "stripped"})["score"] == 1.0


def test_a_row_without_an_entry_is_an_error_not_a_zero():
    for extra in ({}, {"entry": "no json"}, {"entry": None}):
        with pytest.raises(DataError, match=r"extra_info.entry must be"):
            score("-3", extra)


def test_unknown_sources_tasks_and_extractions_are_named():
    with pytest.raises(ConfigError, match="no reward rule for data source 'no/such'; known: "):
        find_rule("no/such")
    with pytest.raises(ConfigError, match="reasoning-gym has no task 'nothing'"):
        score("1", source="reasoning_gym/nothing")
    with pytest.raises(ConfigError, match="unknown answer extraction 'first'; known: last_integer"):
        score("1", {**EXTRA, "extraction": "first"})


def test_letters_pay_by_their_share():
    assert letters_rule("", "aeb", "aeiou", {}) == {"score": 2 / 3, "acc": 1.0}
    assert letters_rule("", "xaxx", "aeiou", {}) == {"score": 0.25, "acc": 0.0}
    assert letters_rule("", "", "aeiou", {}) == {"score": 0.0, "acc": 0.0}


@pytest.mark.parametrize(
    ("source", "truth", "text", "accuracy"),
    [
        ("openai/gsm8k", "1,204", "It is 3. #### 1204", 1.0),
        ("openai/gsm8k", "1204", "#### 7\n#### $1,204.00.", 1.0),
        ("openai/gsm8k", "so 6 + 6 = 12 #### 12", "#### 12", 1.0),
        ("openai/gsm8k", "12", "the answer is 12", 0.0),
        ("openai/gsm8k", "-12", "#### 12", 0.0),
        ("lighteval/MATH", "\\frac{1}{2}", "so \\boxed{0.5}", 1.0),
        ("HuggingFaceH4/MATH-500", "\\frac{1}{2}", "$\\frac{2}{4}$", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", "x^2 - 1", "\\boxed{(x-1)(x+1)}", 1.0),
        ("lighteval/MATH", "3", "\\boxed{4}", 0.0),
        ("lighteval/MATH", "3", "\N{GRINNING FACE}", 0.0),
        ("exact_match", "Paris ", " Paris\n", 1.0),
        ("exact_match/capitals", "Paris", "paris", 0.0),
        ("exact_match", "Paris", "", 0.0),
    ],
)
def test_each_source_has_its_rule(source, truth, text, accuracy):
    assert rule_by_data_source(source, text, truth, {}) == {"score": accuracy, "acc": accuracy}


def test_an_exact_match_may_name_an_extraction():
    extra = {"extraction": "last_integer"}
    assert rule_by_data_source("exact_match", "It is 7.", 7, extra)["acc"] == 1.0


def test_a_truth_that_is_no_mathematics_is_the_rows_fault():
    with pytest.raises(DataError, match="cannot be read as mathematics"):
        rule_by_data_source("lighteval/MATH", "3", "\\\\", {})
