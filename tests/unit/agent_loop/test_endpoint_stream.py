"""Streams as OpenAI's client reads them: while the model writes, in whole characters."""

import asyncio
import time

import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlcore.agent_loop.endpoint.text import TextReader
from rlcore.errors import RolloutError
from rlcore.rollout.client import WATCH_INTERVAL_S
from rlcore.types import TokenOutput

HELLO = [{"role": "user", "content": "Hello"}]


async def read(client, **options):
    """Return the chunks of a stream and when each came."""
    stream = await client.chat.completions.create(
        model="any", messages=HELLO, stream=True, **options
    )
    return [(time.monotonic(), chunk) async for chunk in stream]


def text_of(chunks):
    return "".join(c.choices[0].delta.content or "" for _, c in chunks if c.choices)


def test_text_comes_while_it_is_written_and_is_that_of_a_whole_answer(talk):
    async def agent(client, access):
        chunks = await read(client, stream_options={"include_usage": True})
        whole = await client.chat.completions.create(model="any", messages=HELLO)
        return chunks, whole

    done = talk(agent, "The quick brown fox jumps. " * 3, token_s=0.01)
    chunks, whole = done.result
    assert text_of(chunks) == whole.choices[0].message.content == "The quick brown fox jumps. " * 3
    with_text = [at for at, c in chunks if c.choices and c.choices[0].delta.content]
    # 82 tokens of 10 ms, seen every 100 ms.
    assert len(with_text) >= 4
    assert with_text[-1] - with_text[0] >= 2 * WATCH_INTERVAL_S
    assert chunks[0][1].choices[0].delta.role == "assistant"
    reasons = [c.choices[0].finish_reason for _, c in chunks if c.choices]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]
    assert (chunks[-1][1].choices, chunks[-1][1].usage) == ([], whole.usage)
    assert whole.usage.completion_tokens == 82
    # Both were recorded, each as it was sampled.
    first, second = done.outputs
    assert first.response_ids == second.response_ids
    assert first.response_logprobs == second.response_logprobs


def test_a_stream_tells_of_each_token_once(talk):
    async def agent(client, access):
        return await read(client, logprobs=True, extra_body={"return_token_ids": True})

    done = talk(agent, "A few words.", token_s=0.02)
    choices = [c.choices[0] for _, c in done.result]
    [output] = done.outputs
    assert [token for choice in choices for token in choice.token_ids] == output.response_ids
    told = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert [entry.logprob for entry in told] == output.response_logprobs
    assert done.result[0][1].prompt_token_ids == output.prompt_ids


def test_completions_stream_too(talk):
    async def agent(client, access):
        stream = await client.completions.create(
            model="any", prompt="Q", stream=True, stop=["###"], logprobs=0
        )
        return [chunk.choices[0] async for chunk in stream]

    done = talk(agent, "one #two ### three", token_s=0.02)
    assert "".join(choice.text for choice in done.result) == "one #two "
    assert done.result[-1].finish_reason == "stop"
    told = [value for c in done.result if c.logprobs for value in c.logprobs.token_logprobs]
    assert told == done.outputs[0].response_logprobs
    offsets = [at for c in done.result if c.logprobs for at in c.logprobs.text_offset]
    assert offsets == list(range(len("one #two ###")))


def test_nothing_is_sent_that_may_be_the_beginning_of_a_stop_string(talk):
    async def agent(client, access):
        return await read(client, stop=["\n\nNext"])

    done = talk(agent, "a\n\nb\n\nNext", token_s=0.11)
    texts = [c.choices[0].delta.content for _, c in done.result]
    assert text_of(done.result) == "a\n\nb"
    assert not any(text and text.endswith("\n") for text in texts)


def test_a_stream_that_its_client_leaves_is_no_turn(talk):
    async def agent(client, access):
        stream = await client.chat.completions.create(model="any", messages=HELLO, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await talk.replica.is_idle.wait()

    assert talk(agent, "word " * 40, token_s=0.02).outputs == []


class Breaks:
    """Shows some tokens, then breaks the contract."""

    def __init__(self, shown, after_s):
        self.shown = shown
        self.after_s = after_s

    async def generate(self, request_id, prompt_ids, sampling_params):
        await asyncio.sleep(self.after_s)
        raise RolloutError("it broke")

    async def partial(self, request_id):
        return TokenOutput(
            token_ids=self.shown, log_probs=[-1.0] * len(self.shown),
            weight_versions=[0] * len(self.shown), stop_reason="",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("after_s", "kind"), [(0.0, openai.InternalServerError), (0.3, openai.APIError)]
)
def test_a_fault_is_an_error_before_and_within_a_stream(talk, after_s, kind):
    async def agent(client, access):
        with pytest.raises(openai.APIError, match="it broke") as caught:
            await read(client)
        return type(caught.value)

    done = talk(agent, "", replicas={"replica-0": Breaks([40, 41], after_s)})
    assert (done.result, done.outputs) == (kind, [])


@pytest.fixture(scope="module")
def bytes_tokenizer():
    """Every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def test_characters_come_whole(bytes_tokenizer):
    text = "naïve 🦊 火"
    ids = bytes_tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    reader = TextReader(bytes_tokenizer, stops=[], opening=None)
    pieces = [reader.feed([token]) for token in ids]
    assert [piece for piece in pieces if piece] == list(text)
    assert reader.finish() == ""


def test_the_rest_of_a_character_that_never_came_is_a_replacement(bytes_tokenizer):
    reader = TextReader(bytes_tokenizer, stops=[], opening=None)
    ids = bytes_tokenizer("ok🦊")["input_ids"][:-1]
    assert reader.feed(ids) == "ok"
    assert reader.finish() == "\ufffd"
    assert reader.text == bytes_tokenizer.decode(ids)


def test_pieces_of_any_size_make_the_same_text(bytes_tokenizer):
    ids = bytes_tokenizer("é<tool_ca <tool_call>x## ### <tool_call>")["input_ids"]
    for opening in (None, "<tool_call>"):
        for size in range(1, len(ids) + 1):
            reader = TextReader(bytes_tokenizer, stops=["###"], opening=opening)
            sent = "".join(reader.feed(ids[i : i + size]) for i in range(0, len(ids), size))
            assert sent == ("é<tool_ca <tool_call>x## " if opening is None else "é<tool_ca ")
            assert sent + reader.finish() == reader.text == "é<tool_ca <tool_call>x## "
            assert reader.hidden(ids) == ["### <tool_call>", "###"]
