"""The tool agent from end to end with a scripted model: tokens, masks, limits, faults."""

import json
import time

import pytest

from rlcore.agent_loop.choice import AgentLoopChooser
from rlcore.data.tokenizer import load_tokenizer
from rlcore.errors import ConfigError
from rlcore.testing.scripted_replica import ScriptedReplica, texts_by_mask

TOOLS = """
import asyncio, os, re, time
from typing import Annotated
from pydantic import Field
from rlcore.tools import ToolAnswer, function_tool

@function_tool
async def add(a: int, b: Annotated[int, Field(description="the second")] = 1) -> int:
    '''Add two numbers.'''
    return a + b

@function_tool
async def fault(kind: str):
    '''Do something bad.'''
    match kind:
        case "raise":
            raise ZeroDivisionError("no")
        case "hang":
            await asyncio.sleep(60)
        case "megabyte":
            return "x" * 1_000_000
        case "reward":
            return ToolAnswer(text="good", reward=0.5)
        case "nothing":
            return None

@function_tool
def sync_fault(kind: str):
    '''Do something bad without awaiting.'''
    match kind:
        case "hang":
            re.fullmatch("(a*)*b", "a" * 64)
        case "die":
            os._exit(7)
        case "megabyte":
            return "y" * 1_000_000
"""


def call(name, **arguments):
    body = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


@pytest.fixture
def play(run_session, make_config, tmp_path):
    """Run one session whose model writes `turns` one after the other."""
    (tmp_path / "my_tools.py").write_text(TOOLS)

    def play(turns, fields=None, **settings):
        tokenizer = load_tokenizer(make_config().actor_rollout_ref.model.path)
        asked = []

        def write(prompt, seed):
            asked.append(prompt)
            return turns[len(asked) - 1] if isinstance(turns, list) else turns(prompt)

        replica = ScriptedReplica(tokenizer, write, end_token_id=2, version=3)
        overrides = {
            "data__max_prompt_length": 2000,
            "data__max_response_length": 1000,
            "actor_rollout_ref__rollout__agent__default_agent_loop": "tool_agent",
            "actor_rollout_ref__rollout__multi_turn__function_tool_path": str(
                tmp_path / "my_tools.py"
            ),
        }
        for name, value in settings.items():
            key = name if "__" in name else f"actor_rollout_ref__rollout__multi_turn__{name}"
            overrides[key] = value
        _, result = run_session(replica, fields=fields, **overrides)
        row = result.rows[0] if result.rows else None
        return tokenizer, row, result.record, replica

    return play


def test_a_call_is_answered_and_the_answer_is_masked(play):
    turn = "I add. " + call("add", a=2, b=3)
    tokenizer, row, record, replica = play([turn, "It is 5."])
    assert record.error_message == ""
    assert texts_by_mask(tokenizer, row) == [
        (1, f"{turn}<|im_end|>"),
        (0, "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"),
        (1, "It is 5.<|im_end|>"),
    ]
    mask = row["response_mask"]
    assert row["rollout_log_probs"].tolist() == (-1.0 * mask).tolist()
    assert row["weight_versions"].tolist() == [3 if m else -1 for m in mask.tolist()]
    assert record.num_turns == 4  # user, assistant, tool, assistant
    assert (record.metrics["num_tool_calls"], record.metrics["num_invalid_calls"]) == (1, 0)
    # The second turn reads the first one's own tokens and asks for what is left.
    (first, params), (second, later) = replica.requests
    num_seen = len(second) - len(first)
    assert second[len(first) :] == row["responses"][:num_seen].tolist()
    assert (params["max_tokens"], later["max_tokens"]) == (1000, 1000 - num_seen)


def test_the_model_is_told_of_the_tools(play):
    tokenizer, row, _, _ = play(["done"])
    prompt = tokenizer.decode(row["prompts"])
    assert '"name": "add"' in prompt
    assert "Add two numbers." in prompt
    assert "the second" in prompt
    assert prompt.index("<tools>") < prompt.index("Vowels")


def test_a_row_may_have_a_part_of_the_tools(play):
    fields = {"extra_info": {"tool_selection": ["add"]}}
    tokenizer, row, record, _ = play([call("fault", kind="raise"), "done"], fields=fields)
    assert '"name": "fault"' not in tokenizer.decode(row["prompts"])
    assert "the tool fault is not available here" in texts_by_mask(tokenizer, row)[1][1]
    assert record.metrics["num_invalid_calls"] == 1
    _, _, record, _ = play(["done"], fields={"extra_info": {"tool_selection": ["no"]}})
    assert "tool_selection names no; there are add, fault, sync_fault" in record.error_message


@pytest.mark.parametrize(
    ("turn", "answer"),
    [
        (call("fault", kind="raise"), "Error: ZeroDivisionError: no"),
        (call("fault", kind="hang"), "Error: fault took longer than 0.5 s"),
        (call("fault", kind="nothing"), ""),
        (call("sync_fault", kind="hang"), "Error: sync_fault took longer than 0.5 s"),
        (call("sync_fault", kind="die"), "Error: the process of the tool died: exit code 7"),
        (call("subtract", a=1), "Error: there is no tool 'subtract'; there are: add, fault, "),
        (call("add", a="x", c=1), "Error: a: Input should be a valid integer"),
        ("<tool_call>{broken</tool_call>", "Error: the tool call is not valid JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', "Error: the tool call has no name"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "Error: the tool call's arg"),
    ],
)
def test_whatever_a_tool_does_the_model_is_told_and_goes_on(play, turn, answer):
    started = time.monotonic()
    tokenizer, row, record, _ = play([turn, "I see."], tool_timeout=0.5)
    (_, _), (mask, told), (_, last) = texts_by_mask(tokenizer, row)
    assert (mask, last) == (0, "I see.<|im_end|>")
    assert told.startswith(f"\n<|im_start|>tool\n{answer}")
    assert record.reward is not None
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("name", "side", "told"),
    [
        ("fault", "middle", "x" * 5 + "...(cut)..." + "x" * 5),
        ("fault", "left", "x" * 10 + "...(cut)..."),
        ("sync_fault", "right", "...(cut)..." + "y" * 10),
    ],
)
def test_a_megabyte_is_cut(play, name, side, told):
    tokenizer, row, _, _ = play(
        [call(name, kind="megabyte"), "done"],
        max_tool_response_length=10,
        tool_response_truncate_side=side,
    )
    assert f"tool\n{told}<|im_end|>" in texts_by_mask(tokenizer, row)[1][1]


def test_tool_rewards_reach_the_reward_function(play, tmp_path):
    path = tmp_path / "score.py"
    path.write_text(
        "def compute_score(extra_info, **row):\n"
        "    return sum(extra_info['tool_rewards']) + extra_info['num_turns']\n"
    )
    _, _, record, _ = play(
        [call("fault", kind="reward"), "done"], reward__custom_reward_function__path=str(path)
    )
    assert record.reward == 4.5


def forever(prompt):
    return call("add", a=1)


@pytest.mark.parametrize(
    ("settings", "num_sampled_turns", "num_calls"),
    [
        ({"max_assistant_turns": 3}, 3, 2),
        ({"max_user_turns": 2}, 3, 2),
        # A turn is 64 tokens with its end, an answer 21: 64 + 21 + 64 + 21 + 30 of a third.
        ({"data__max_response_length": 200}, 3, 2),
    ],
)
def test_a_model_that_calls_for_ever_is_stopped(play, settings, num_sampled_turns, num_calls):
    _, row, record, replica = play(forever, **settings)
    assert len(replica.requests) == num_sampled_turns
    assert record.metrics["num_tool_calls"] == num_calls
    # It ends with what the model wrote: an answer that nobody reads is not appended.
    assert row["response_mask"][-1] == 1


def test_the_budget_is_never_exceeded(play):
    for limit in range(20, 240, 20):
        _, row, _, replica = play(forever, data__max_response_length=limit)
        assert len(row["responses"]) <= limit
        assert all(
            len(ids) - len(row["prompts"]) + params["max_tokens"] == limit
            for ids, params in replica.requests
        )


def test_invalid_calls_end_the_session_at_their_limit(play):
    _, _, record, replica = play(lambda _: call("no"), max_invalid_calls=2)
    assert len(replica.requests) == 2
    assert record.metrics["num_invalid_calls"] == 2


def test_parallel_calls_are_answered_in_order_and_the_rest_is_left_out(play):
    turn = call("add", a=1) + call("add", a=10) + call("add", a=100)
    tokenizer, row, record, _ = play([turn, "done"], max_parallel_calls=2)
    told = texts_by_mask(tokenizer, row)[1][1]
    assert told == (
        "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>tool\n11<|im_end|>\n<|im_start|>assistant\n"
    )
    assert record.metrics["num_tool_calls"] == 2


def test_the_other_format_casts_its_arguments(play):
    turn = (
        "<tool_call>\n<function=add>\n<parameter=a>\n4\n</parameter>\n<parameter=b>\n5\n"
        "</parameter>\n</function>\n</tool_call>"
    )
    tokenizer, row, _, _ = play([turn, "done"], format="qwen3_coder")
    assert "tool\n9<|im_end|>" in texts_by_mask(tokenizer, row)[1][1]
    assert "<parameter=ARGUMENT>" in tokenizer.decode(row["prompts"])


def test_calls_in_reasoning_are_not_run(play):
    turn = f"{call('add', a=1)} or so?</think>No."
    _, _, record, replica = play([turn])
    assert (len(replica.requests), record.metrics["num_tool_calls"]) == (1, 0)


def test_a_prompt_that_is_too_long_with_its_tools_fails_its_session(play):
    _, row, record, _ = play(["done"], data__max_prompt_length=64)
    assert row is None
    assert "the prompt with the descriptions of its tools has" in record.error_message


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1", "no function is marked @function_tool"),
        ("from rlcore.tools import function_tool\n@function_tool\ndef f(): pass",
         "f needs a docstring"),
    ],
)  # fmt: skip
def test_a_file_without_tools_is_refused(make_config, tmp_path, code, message):
    from rlcore.tools.toolbox import Toolbox

    path = tmp_path / f"tools_{len(code)}.py"
    path.write_text(code)
    config = make_config(actor_rollout_ref__rollout__multi_turn__function_tool_path=str(path))
    with pytest.raises(ConfigError, match=message):
        Toolbox(config)


def test_what_tool_agent_needs_is_checked_at_the_start(make_config):
    config = make_config()
    loop_class = AgentLoopChooser("tool_agent", None).choose(None).loop_class
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    with pytest.raises(ConfigError, match=r"tool_agent needs tools: set .*function_tool_path"):
        loop_class.check_at_start(config, tokenizer)
    with_tools = make_config(
        actor_rollout_ref__rollout__multi_turn__function_tool_path="rlcore.tools.calculator"
    )
    [notice] = loop_class.check_at_start(with_tools, tokenizer)
    assert "does not show tools to the model" in notice
