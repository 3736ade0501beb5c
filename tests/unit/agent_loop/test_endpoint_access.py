"""Who is answered, and what is refused how: by the classes of errors of OpenAI's own client."""

import asyncio
import json
import logging
import urllib.error
import urllib.request

import openai
import pytest

from rlcore.agent_loop.endpoint.server import Endpoint
from rlcore.data.tokenizer import load_tokenizer
from rlcore.errors import ConfigError

HELLO = [{"role": "user", "content": "Hello"}]


def refused(kind, question):
    """Return an agent that is refused; its result is the error."""

    async def agent(client, access):
        with pytest.raises(kind) as caught:
            await question(client, access)
        return caught.value

    return agent


def chat(**options):
    return lambda client, access: client.chat.completions.create(
        **{"model": "any", "messages": HELLO, **options}
    )


def complete(**options):
    return lambda client, access: client.completions.create(model="any", **options)


def test_a_wrong_token_is_refused(talk):
    done = talk(refused(openai.AuthenticationError, chat()), "Hi.", api_key="guessed")
    assert (done.result.code, done.result.status_code) == ("invalid_api_key", 401)
    assert (done.replica.requests, done.outputs) == ([], [])


def test_a_missing_token_is_refused(talk):
    def post(url):
        body = json.dumps({"model": "any", "messages": HELLO}).encode()
        try:
            urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body))
        except urllib.error.HTTPError as error:
            return error.code, error.headers["WWW-Authenticate"], json.load(error)["error"]["code"]

    done = talk(lambda client, access: asyncio.to_thread(post, access.base_url), "Hi.")
    assert done.result == (401, "Bearer", "invalid_api_key")


def test_another_session_is_not_found(talk):
    async def question(client, access):
        other = access.base_url.replace("sessions/", "sessions/x")
        await chat()(client.with_options(base_url=other), access)

    done = talk(refused(openai.NotFoundError, question), "Hi.")
    assert "no such session" in done.result.message


def test_a_session_that_has_ended_answers_no_more(make_config):
    config = make_config()
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)

    class Waits:
        """Never answers."""

        def __init__(self):
            self.began = asyncio.Event()

        async def generate(self, *args, **kwargs):
            self.began.set()
            await asyncio.Event().wait()

    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop_token_ids": [2]}

    async def run():
        endpoint, server = Endpoint(config, tokenizer), Waits()
        try:
            async with endpoint.session(server, params) as (_, access):
                client = openai.AsyncOpenAI(
                    base_url=access.base_url, api_key=access.api_key, max_retries=0
                )
                waiting = asyncio.create_task(chat()(client, access))
                await server.began.wait()
            for request in (waiting, chat()(client, access)):
                with pytest.raises(openai.NotFoundError, match="has ended"):
                    await request
            await client.close()
        finally:
            await endpoint.close()

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(
    ("question", "param", "message"),
    [
        (chat(extra_body={"colour": 1, "depth": 2}), "colour", "unknown options: colour, depth"),
        (chat(n=2), "n", "n: "),
        (chat(top_logprobs=3, logprobs=True), "top_logprobs", "top_logprobs: "),
        (chat(presence_penalty=0.5), "presence_penalty", "less than or equal to 0"),
        (chat(tools=[{"type": "function", "function": {}}]), "tools", "tools.0.function.name"),
        (chat(tool_choice="required"), "tool_choice", "'auto'"),
        (chat(response_format={"type": "json_object"}), "response_format", "only {type: text}"),
        (chat(stop=[""]), "stop", "at least 1 character"),
        (chat(max_tokens=0), "max_tokens", "greater than or equal to 1"),
        (chat(stream_options={"include_usage": True}), None, "stream_options is for stream=true"),
        (chat(messages=[]), "messages", "at least 1 item"),
        (chat(messages=[{"content": "x"}]), "messages[0].role", "must be a text"),
        (chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
         "messages[0].content", "only text models"),
        (complete(prompt=[]), "prompt", "prompt"),
        (complete(prompt=["a", "b"]), "prompt", "several prompts"),
        (complete(prompt=[5, 10**6]), "prompt", "is none of the model's"),
        (complete(prompt="a", logprobs=2), "logprobs", "logprobs: "),
        (complete(prompt="a", echo=True), "echo", "echo: "),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(talk, question, param, message):
    done = talk(refused(openai.BadRequestError, question), "Hi.")
    assert done.result.param == param
    assert message in done.result.message
    assert done.outputs == []


def test_neutral_values_are_accepted(talk):
    async def agent(client, access):
        await chat(
            n=1, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, user="me", store=False,
            parallel_tool_calls=True, response_format={"type": "text"}, stream=False,
            extra_body={"repetition_penalty": 1.0, "min_p": 0},
        )(client, access)  # fmt: skip
        await complete(prompt=["a"], echo=False, best_of=1, suffix="")(client, access)

    assert len(talk(agent, "Hi.").outputs) == 2


def test_the_runs_sampling_is_used_and_others_are_told_of_once(talk, caplog):
    async def agent(client, access):
        for temperature in (0.2, 0.3, 0.7):
            await chat(temperature=temperature, top_p=1, seed=5)(client, access)

    done = talk(agent, "Hi.")
    assert [params["temperature"] for _, params in done.replica.requests] == [0.7] * 3
    told = [record.getMessage() for record in caplog.records if "an agent asks" in record.msg]
    assert [text.split(" and is")[0] for text in told] == [
        "an agent asks for temperature=0.2", "an agent asks for seed=5",
    ]  # fmt: skip


def test_greedy_sessions_have_temperature_0(talk, caplog):
    talk(chat(temperature=0), "Hi.", greedy=True)
    assert not [record for record in caplog.records if "an agent asks" in record.msg]


@pytest.mark.parametrize(
    ("question", "param"), [(chat(), "messages"), (complete(prompt="x" * 20), "prompt")]
)
def test_a_prompt_that_is_too_long_is_refused_as_openai_does(talk, question, param):
    done = talk(refused(openai.BadRequestError, question), "Hi.", max_prompt=19)
    assert (done.result.code, done.result.param) == ("context_length_exceeded", param)
    assert "data.max_prompt_length=19" in done.result.message


def test_a_response_that_is_full_is_refused_as_openai_does(talk):
    async def question(client, access):
        messages = list(HELLO)
        for _ in range(9):
            answer = await chat(messages=messages)(client, access)
            messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "?"}]

    done = talk(refused(openai.BadRequestError, question), "Hello.", max_response=70)
    assert done.result.code == "context_length_exceeded"
    # A turn has 7 tokens and what is between two 21: 7 + 21 + 7 + 21 + 7, 21 more would not fit.
    assert [len(output.response_ids) for output in done.outputs] == [63]


def test_an_outage_looks_like_an_outage(talk):
    done = talk(refused(openai.InternalServerError, chat()), "Hi.", replicas={})
    assert done.result.status_code == 503
    assert "none serves" in done.result.message


@pytest.mark.parametrize("path", ["/embeddings", "/chat/completions/"])
def test_other_paths_are_answered_as_json(talk, path):
    async def question(client, access):
        await client.post(path, cast_to=object, body={})

    assert talk(refused(openai.NotFoundError, question), "").result.body["type"] == (
        "invalid_request_error"
    )


def test_log_probs_and_ids_are_those_that_are_recorded(talk):
    async def agent(client, access):
        extra = {"return_token_ids": True}
        return await chat(logprobs=True, extra_body=extra)(client, access), await complete(
            prompt="Q", logprobs=0, extra_body=extra
        )(client, access)

    done = talk(agent, "Hi.")
    chatted, completed = done.result
    first, second = done.outputs
    entries = chatted.choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == first.response_logprobs
    assert [entry.token for entry in entries] == ["H", "i", ".", "<|im_end|>"]
    assert [entry.bytes for entry in entries[:2]] == [[72], [105]]
    assert chatted.choices[0].token_ids == first.response_ids
    assert chatted.prompt_token_ids == first.prompt_ids
    assert completed.choices[0].logprobs.token_logprobs == second.response_logprobs
    assert completed.choices[0].logprobs.tokens == ["H", "i", ".", "<|im_end|>"]


def test_the_model_is_listed(talk):
    async def agent(client, access):
        return [model.id async for model in client.models.list()], access.model

    assert talk(agent, "").result == (["policy"], "policy")


def test_the_token_is_in_no_log(talk, caplog):
    caplog.set_level(logging.DEBUG)

    async def agent(client, access):
        await chat()(client, access)
        with pytest.raises(openai.BadRequestError):
            await chat(n=2)(client, access)

    done = talk(agent, "Hi.")
    assert "is answered 400" in caplog.text
    assert done.access.api_key not in caplog.text
    wrong = talk(refused(openai.AuthenticationError, chat()), "Hi.", api_key="my-secret-key")
    assert "is answered 401" in caplog.text
    assert "my-secret-key" not in caplog.text
    assert wrong.access.api_key not in caplog.text


def test_every_worker_has_a_token_of_its_own_on_loopback(talk):
    first, second = (talk(chat(), "Hi.").access for _ in range(2))
    assert first.api_key != second.api_key
    assert first.base_url.startswith("http://127.0.0.1:")
    assert min(len(first.api_key), len(first.base_url.split("/")[4])) >= 20


def test_a_host_that_is_none_is_refused(make_config):
    key = "actor_rollout_ref__rollout__agent__endpoint_host"
    config = make_config(**{key: "192.0.2.1"})
    endpoint = Endpoint(config, load_tokenizer(config.actor_rollout_ref.model.path))

    async def run():
        async with endpoint.session(None, {}):
            pass

    with pytest.raises(ConfigError, match=r"agent\.endpoint_host=192\.0\.2\.1"):
        asyncio.run(run())
