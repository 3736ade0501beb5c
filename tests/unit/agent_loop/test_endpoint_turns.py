"""What requests of OpenAI's own client record: turns that continue each other, forks, texts."""

import asyncio
from dataclasses import replace

import pytest

from rlcore.agent_loop.chat_encoder import chat_encoder
from rlcore.rollout.client import sampling_seed

HELLO = {"role": "user", "content": "Hello"}
MORE = {"role": "user", "content": "And more?"}
NEXT = "\n<|im_start|>user\nAnd more?<|im_end|>\n<|im_start|>assistant\n"


def ask(client, messages, **options):
    return client.chat.completions.create(model="any", messages=messages, **options)


def say(completion):
    return completion.choices[0].message


async def two_turns(client, access):
    first = say(await ask(client, [HELLO]))
    return first, say(await ask(client, [HELLO, first.model_dump(), MORE]))


def test_a_conversation_is_one_trajectory_of_the_tokens_that_were_sampled(talk):
    done = talk(two_turns, ["Hi.", "No."])
    assert [message.content for message in done.result] == ["Hi.", "No."]
    [output] = done.outputs
    assert done.pieces() == [(1, "Hi.<|im_end|>"), (0, NEXT), (1, "No.<|im_end|>")]
    pairs = list(zip(output.response_ids, output.response_mask, strict=True))
    assert output.response_logprobs == [-t / 100 if m else 0.0 for t, m in pairs]
    assert output.weight_versions == [3 if m else -1 for _, m in pairs]
    assert output.num_turns == 4  # user, assistant, user, assistant
    assert output.extra_fields["stop_reason"] == "completed"
    # The second turn read the first one's tokens, and had a seed of its own.
    (first, params), (second, later) = done.replica.requests
    assert first == output.prompt_ids
    assert second == output.prompt_ids + output.response_ids[: len(second) - len(first)]
    assert [params["seed"], later["seed"]] == [sampling_seed(0, "train/0/1", 0, t) for t in (0, 1)]
    # And it may fill what is left.
    assert (params["max_tokens"], later["max_tokens"]) == (1000, 1000 - (len(second) - len(first)))


def test_the_whole_is_what_the_encoder_makes_of_a_conversation_turn_by_turn(talk):
    done = talk(two_turns, ["Hi.", "No."])
    encoder = chat_encoder(done.tokenizer, {}, [2], uses_tools=False)
    sampled = [done.tokenizer(f"{text}<|im_end|>")["input_ids"] for text in ("Hi.", "No.")]
    [output] = done.outputs
    assert output.prompt_ids + output.response_ids == [
        *encoder.start([HELLO]), *sampled[0], *encoder.following([MORE]), *sampled[1],
    ]  # fmt: skip
    whole = [HELLO, {"role": "assistant", "content": "Hi."}, MORE]
    seen = done.replica.requests[1][0]
    assert done.tokenizer.decode(seen) == done.tokenizer.apply_chat_template(
        whole, tokenize=False, add_generation_prompt=True
    )


def test_the_plain_client_records_the_same(talk):
    def agent(client, access):
        first = say(ask(client, [HELLO]))
        return say(ask(client, [HELLO, {"role": "assistant", "content": first.content}, MORE]))

    def recorded(done):
        [output] = done.outputs
        return replace(output, metrics={})  # seconds are its own

    plain = talk(agent, ["Hi.", "No."], sync=True)
    assert recorded(plain) == recorded(talk(two_turns, ["Hi.", "No."]))


def test_a_conversation_that_begins_otherwise_is_a_trajectory_of_its_own(talk):
    async def agent(client, access):
        await ask(client, [HELLO])
        changed = {"role": "assistant", "content": "Hi, changed."}
        await ask(client, [HELLO, changed, MORE])
        await ask(client, [MORE])

    done = talk(agent, ["Hi.", "No.", "Yes."])
    assert [done.pieces(i) for i in range(3)] == [
        [(1, f"{text}<|im_end|>")] for text in ("Hi.", "No.", "Yes.")
    ]
    assert "Hi, changed.<|im_end|>" in done.prompt(1)
    assert [output.num_turns for output in done.outputs] == [2, 2, 2]


def test_a_fork_makes_two_trajectories_and_its_shared_turns_are_trained_once(talk):
    async def agent(client, access):
        first = say(await ask(client, [HELLO])).model_dump(exclude_none=True)
        for question in ("Left?", "Right?"):
            await ask(client, [HELLO, first, {"role": "user", "content": question}])

    done = talk(agent, ["Hi.", "L", "R"])
    left, right = (
        f"\n<|im_start|>user\n{word}?<|im_end|>\n<|im_start|>assistant\n"
        for word in ("Left", "Right")
    )
    assert done.pieces(0) == [(1, "Hi.<|im_end|>"), (0, left), (1, "L<|im_end|>")]
    assert done.pieces(1) == [(0, f"Hi.<|im_end|>{right}"), (1, "R<|im_end|>")]
    second = done.outputs[1]
    sampled = [i for i, m in enumerate(second.response_mask) if m]
    assert all(second.weight_versions[i] == -1 for i in range(sampled[0]))
    assert [second.response_logprobs[i] for i in sampled] == [
        -second.response_ids[i] / 100 for i in sampled
    ]
    assert sum(output.metrics["num_requests"] for output in done.outputs) == 3
    assert [output.num_turns for output in done.outputs] == [4, 4]


def test_requests_at_the_same_time_are_answered_and_equal_answers_are_continued_one_by_one(talk):
    async def agent(client, access):
        first = await asyncio.gather(*(ask(client, [HELLO]) for _ in range(4)))
        await asyncio.gather(
            *(ask(client, [HELLO, say(answer).model_dump(), MORE]) for answer in first)
        )

    done = talk(agent, lambda text, seed: "Yes." if "more" in text else "Hi.", token_s=0.005)
    assert len(done.outputs) == 4
    for index in range(4):
        assert done.pieces(index) == [(1, "Hi.<|im_end|>"), (0, NEXT), (1, "Yes.<|im_end|>")]
    assert len({params["seed"] for _, params in done.replica.requests}) == 8


def test_a_turn_that_was_cut_off_is_closed_before_the_next(talk):
    async def agent(client, access):
        first = await ask(client, [HELLO], max_tokens=3)
        assert first.choices[0].finish_reason == "length"
        await ask(client, [HELLO, say(first).model_dump(), MORE], max_completion_tokens=2)

    done = talk(agent, ["A long answer.", "Hm."])
    assert done.pieces() == [(1, "A l"), (0, f"<|im_end|>{NEXT}"), (1, "Hm")]
    assert [params["max_tokens"] for _, params in done.replica.requests] == [3, 2]
    assert done.outputs[0].extra_fields["stop_reason"] == "length"


def test_a_stop_string_ends_the_text_and_stays_in_the_trajectory(talk):
    async def agent(client, access):
        first = await ask(client, [HELLO], stop=["END", "never"])
        await ask(client, [HELLO, say(first).model_dump(), MORE])
        return first.choices[0]

    done = talk(agent, ["So it is.END of it", "Yes."])
    assert (done.result.message.content, done.result.finish_reason) == ("So it is.", "stop")
    assert done.pieces() == [
        (1, "So it is.END"), (0, f"<|im_end|>{NEXT}"), (1, "Yes.<|im_end|>"),
    ]  # fmt: skip


@pytest.mark.parametrize("as_ids", [False, True])
def test_completions_continue_what_they_begin_with(talk, as_ids):
    async def agent(client, access):
        prompt = [4 + ord(c) - 31 for c in "Q: 2?"] if as_ids else "Q: 2?"
        extra = {"return_token_ids": True}
        first = await client.completions.create(
            model="any", prompt=prompt, stop="Obs:", extra_body=extra
        )
        [choice] = first.choices
        assert choice.text == "I look. "
        told = [4 + ord(c) - 31 for c in " 5."] if as_ids else "Obs: 5."
        prompt = prompt + (choice.token_ids if as_ids else choice.text) + told
        await client.completions.create(model="any", prompt=prompt)
        # And one that has nothing to do with them.
        await client.completions.create(model="any", prompt="Q: 3?")

    done = talk(agent, ["I look. Obs: 4", "It is 5.", "No."])
    assert done.prompt(0) == "Q: 2?"
    assert done.pieces(0) == [(1, "I look. Obs:"), (0, " 5."), (1, "It is 5.<|im_end|>")]
    assert (done.prompt(1), done.pieces(1)) == ("Q: 3?", [(1, "No.<|im_end|>")])


def test_a_completion_that_ends_itself_may_be_followed_by_the_clients_own_template(talk):
    async def agent(client, access):
        prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        first = await client.completions.create(model="any", prompt=prompt)
        await client.completions.create(
            model="any", prompt=f"{prompt}{first.choices[0].text}<|im_end|>{NEXT}"
        )

    done = talk(agent, ["Hello.", "Yes."])
    assert done.pieces() == [(1, "Hello.<|im_end|>"), (0, NEXT), (1, "Yes.<|im_end|>")]


def test_the_same_text_asked_again_is_not_taken_for_a_continuation_of_an_empty_response(talk):
    async def agent(client, access):
        for _ in range(2):
            await client.completions.create(model="any", prompt="Q")

    done = talk(agent, ["", "A"])
    assert [done.pieces(i) for i in range(2)] == [[(1, "<|im_end|>")], [(1, "A<|im_end|>")]]


def test_a_client_that_hangs_up_ends_its_request_and_records_nothing(talk):
    async def agent(client, access):
        request = asyncio.create_task(ask(client, [HELLO]))
        await talk.replica.is_busy.wait()
        request.cancel()
        await talk.replica.is_idle.wait()
        await ask(client, [MORE])

    done = talk(agent, lambda text, seed: "Yes." if "more" in text else "Hi. " * 50, token_s=0.02)
    assert [done.pieces(i) for i in range(len(done.outputs))] == [[(1, "Yes.<|im_end|>")]]
