import numpy as np
import pytest

from rlcore.agent_loop.rows import check_output, complete_output, make_row, make_tag
from rlcore.errors import DataError
from rlcore.schema import COLUMNS, ROLLOUT_COLUMNS
from rlcore.types import AgentLoopOutput, TokenOutput


def output(**changes):
    values = {
        "prompt_ids": [1, 2, 3],
        "response_ids": [10, 11, 50, 51, 12, 13],
        "response_mask": [1, 1, 0, 0, 1, 1],
    }
    return AgentLoopOutput(**{**values, **changes})


def turn(tokens, version, log_prob):
    return TokenOutput(
        token_ids=tokens,
        log_probs=[log_prob] * len(tokens),
        weight_versions=[version] * len(tokens),
        stop_reason="length",
    )


TURNS = [turn([10, 11], 4, -0.5), turn([12, 13, 14], 5, -0.25)]


def test_a_loop_written_for_verl_gets_its_versions_and_log_probs_from_the_turns():
    result = output()
    complete_output(result, TURNS)  # the last token of turn 2 was cut off
    assert result.weight_versions == [4, 4, -1, -1, 5, 5]
    assert result.response_logprobs == [-0.5, -0.5, 0.0, 0.0, -0.25, -0.25]


def test_what_the_loop_returned_is_kept():
    result = output(response_logprobs=[-1.0] * 6, weight_versions=[9] * 6)
    complete_output(result, TURNS)
    assert result.weight_versions == [9] * 6
    assert result.response_logprobs == [-1.0] * 6


def test_changed_tokens_get_the_oldest_version_and_need_log_probs():
    changed = output(response_ids=[10, 99, 50, 51, 12, 13], response_logprobs=[-1.0] * 6)
    complete_output(changed, TURNS)
    assert changed.weight_versions == [4, 4, -1, -1, 4, 4]
    with pytest.raises(DataError, match="no response_logprobs, and its sampled tokens are not"):
        complete_output(output(response_ids=[10, 99, 50, 51, 12, 13]), TURNS)


def test_a_row_has_the_schemas_columns_types_and_lengths():
    result = output()
    complete_output(result, TURNS)
    row = make_row(result, 0.75)
    assert set(row) == set(ROLLOUT_COLUMNS)
    for name, values in row.items():
        assert values.dtype == np.dtype(COLUMNS[name].dtype)
        assert values.shape == (3 if COLUMNS[name].length == "S" else 6,)
    assert row["responses"].tolist() == [10, 11, 50, 51, 12, 13]
    assert row["response_mask"].tolist() == [1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("mask", "position"), [([1, 1, 0, 0, 1, 1], 5), ([1, 1, 0, 0, 0, 0], 1), ([0] * 6, 5)]
)
def test_the_reward_lies_on_the_last_sampled_token(mask, position):
    result = output(response_mask=mask, response_logprobs=[0.0] * 6, weight_versions=[1] * 6)
    scores = make_row(result, 0.75)["rm_scores"]
    assert scores.tolist() == [0.75 if i == position else 0.0 for i in range(6)]


def test_the_tag_spans_the_versions_of_sampled_tokens():
    result = output()
    complete_output(result, TURNS)
    assert make_tag(make_row(result, 0.0), 7) == {
        "prompt_len": 3, "response_len": 6, "seq_len": 9, "global_steps": 7,
        "min_global_steps": 4, "max_global_steps": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "must return AgentLoopOutput or a list of them, got NoneType"),
        (output(response_ids=[], response_mask=[]), "3 prompt and 0 response tokens"),
        (output(prompt_ids=[]), "0 prompt and 6 response tokens"),
        (output(response_mask=[1] * 5), "6 response tokens and 5 response_mask"),
        (output(response_logprobs=[0.0] * 7), "6 response tokens and 7 response_logprobs"),
        (output(weight_versions=[0]), "6 response tokens and 1 weight_versions"),
        (output(response_mask=[1, 1, 2, 0, 1, 1]), "response_mask must be 0 or 1"),
        (output(prompt_ids=[1] * 9), "a prompt of 9 tokens, more than data.max_prompt_length=8"),
        (output(response_ids=[1] * 7, response_mask=[1] * 7), "a response of 7 tokens, more than"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(result, message):
    with pytest.raises(DataError, match=message):
        check_output(result, max_prompt_length=8, max_response_length=6)


def test_the_limits_themselves_are_allowed():
    check_output(output(), max_prompt_length=3, max_response_length=6)
