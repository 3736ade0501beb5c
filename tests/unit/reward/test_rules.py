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
    with pytest.raises(ConfigError, match="no reward rule for data source 'openai/gsm8k'; known: "):
        find_rule("openai/gsm8k")
    with pytest.raises(ConfigError, match="reasoning-gym has no task 'nothing'"):
        score("1", source="reasoning_gym/nothing")
    with pytest.raises(ConfigError, match="unknown answer extraction 'first'; known: last_integer"):
        score("1", {**EXTRA, "extraction": "first"})


def test_letters_pay_by_their_share():
    assert letters_rule("", "aeb", "aeiou", {}) == {"score": 2 / 3, "acc": 1.0}
    assert letters_rule("", "xaxx", "aeiou", {}) == {"score": 0.25, "acc": 0.0}
    assert letters_rule("", "", "aeiou", {}) == {"score": 0.0, "acc": 0.0}
