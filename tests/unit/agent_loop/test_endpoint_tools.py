"""Tools by way of OpenAI's own client: what the model is told, what it calls, what it gets."""

import json

import pytest

HELLO = {"role": "user", "content": "Add."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def read(client, is_stream, **options):
    """Return content, calls and finish reason of an answer, streamed or not."""
    answer = await client.chat.completions.create(model="any", stream=is_stream, **options)
    if not is_stream:
        [choice] = answer.choices
        calls = choice.message.tool_calls or []
        return choice.message.content or "", [c.model_dump() for c in calls], choice.finish_reason
    content, calls, reason = "", [], None
    async for chunk in answer:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        for piece in choice.delta.tool_calls or []:
            assert piece.index == len(calls)
            calls.append(piece.model_dump(exclude={"index"}))
        reason = choice.finish_reason or reason
    return content, calls, reason


@pytest.mark.parametrize("is_stream", [False, True])
def test_calls_are_read_and_their_answers_continue_the_turn(talk, is_stream):
    turn = "I add. " + call("add", a=1) + call("add", a=2)

    async def agent(client, access):
        content, calls, reason = await read(client, is_stream, messages=[HELLO], tools=TOOLS)
        assert (content, reason) == ("I add. ", "tool_calls")
        assert [c["function"]["arguments"] for c in calls] == ['{"a": 1}', '{"a": 2}']
        messages = [HELLO, {"role": "assistant", "content": content, "tool_calls": calls}]
        messages += [
            {"role": "tool", "tool_call_id": c["id"], "content": f"{number}"}
            for number, c in enumerate(calls)
        ]
        return await read(client, is_stream, messages=messages, tools=TOOLS)

    done = talk(agent, [turn, "Done."], token_s=0.003)
    assert done.result == ("Done.", [], "stop")
    assert done.pieces() == [
        (1, f"{turn}<|im_end|>"),
        (0, "\n<|im_start|>tool\n0<|im_end|>\n<|im_start|>tool\n1<|im_end|>\n"
            "<|im_start|>assistant\n"),
        (1, "Done.<|im_end|>"),
    ]  # fmt: skip
    # The tiny template shows no tools: the system message does.
    assert done.prompt().startswith("<|im_start|>system\nYou can call these tools:\n<tools>\n")
    assert '"description": "Add two numbers."' in done.prompt()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("turn", "options"),
    [
        ("Hm. <tool_call>{broken</tool_call>", {"tools": TOOLS}),
        (call("add", a=1) + "<tool_call>[]</tool_call>", {"tools": TOOLS}),
        (f"{call('add', a=1)} or so?</think>No.", {"tools": TOOLS}),
        (call("add", a=1), {"tools": TOOLS, "tool_choice": "none"}),
        (call("add", a=1), {}),
    ],
)
def test_what_is_no_call_is_plain_text(talk, is_stream, turn, options):
    async def agent(client, access):
        return await read(client, is_stream, messages=[HELLO], **options)

    assert talk(agent, [turn]).result == (turn, [], "stop")


def test_a_call_that_was_cut_off_is_plain_text(talk):
    async def agent(client, access):
        return await read(client, False, messages=[HELLO], tools=TOOLS, max_tokens=50)

    turn = call("add", a=1)
    assert talk(agent, [turn]).result == (turn[:50], [], "length")


def test_other_tools_are_another_conversation(talk):
    async def agent(client, access):
        content, calls, _ = await read(client, False, messages=[HELLO], tools=TOOLS)
        messages = [
            HELLO,
            {"role": "assistant", "content": content, "tool_calls": calls},
            {"role": "tool", "tool_call_id": calls[0]["id"], "content": "2"},
        ]
        await read(client, False, messages=messages)

    done = talk(agent, [call("add", a=1), "Two."])
    assert len(done.outputs) == 2
    assert "tools" not in done.prompt(1)


def test_the_other_format_is_read_too(talk):
    async def agent(client, access):
        return await read(client, False, messages=[HELLO], tools=TOOLS)

    turn = "<tool_call>\n<function=add>\n<parameter=a>\n4\n</parameter>\n</function>\n</tool_call>"
    key = "actor_rollout_ref__rollout__multi_turn__format"
    content, [found], reason = talk(agent, [turn], **{key: "qwen3_coder"}).result
    assert (content, reason) == ("", "tool_calls")
    assert found["function"] == {"name": "add", "arguments": '{"a": 4}'}


def test_ids_of_calls_follow_from_the_session(talk):
    """Some templates show them to the model."""

    async def agent(client, access):
        found = [await read(client, False, messages=[HELLO], tools=TOOLS) for _ in range(2)]
        return [c["id"] for _, calls, _ in found for c in calls]

    done = talk(agent, [call("add", a=1) + call("add", a=2), call("add", a=3)])
    assert done.result == ["call00000", "call00001", "call00002"]
