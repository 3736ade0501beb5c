"""Rewards by a model over real HTTP, with stand-ins for the replicas."""

import asyncio
import json
import urllib.error
import urllib.request

import pytest

from rlcore.data.tokenizer import load_tokenizer
from rlcore.errors import ActorUnavailableError, ConfigError, DataError, RewardError
from rlcore.reward.function import Reward, load_reward_function, uses_rules
from rlcore.reward.loop import RewardLoopManager
from rlcore.reward.model import is_discriminative
from rlcore.reward.model_server import RewardModelServer
from rlcore.reward.scoring import make_scorer
from rlcore.types import TokenOutput

ENABLED = {
    "reward__reward_model__enable": True,
    "reward__reward_model__enable_resource_pool": True,
    "reward__reward_model__nnodes": 1,
    "reward__num_workers": 1,
}


class Replicas:
    """Scores by the number of tokens; as a judge writes what it was told to."""

    def __init__(self, tokenizer, says="", error=None, has_head=True):
        self.tokenizer = tokenizer
        self.requests = []
        self.says = says
        self.error = error
        self.has_head = has_head

    async def generate(self, request_id, prompt_ids, sampling_params):
        self.requests.append((self.tokenizer.decode(prompt_ids), sampling_params))
        if self.error is not None:
            raise self.error
        ids = self.tokenizer(self.says, add_special_tokens=False)["input_ids"] + [2]
        output = TokenOutput(
            token_ids=ids[: sampling_params["max_tokens"]], log_probs=[], weight_versions=[],
            stop_reason="completed",
        )  # fmt: skip
        if self.has_head:
            output.extra_fields["logits"] = [0.5, float(len(prompt_ids))]
        return output


@pytest.fixture
def model_path(tiny_root):
    return str(tiny_root / "models" / "tiny")


@pytest.fixture
def ask(make_config, model_path):
    """Run `question(server, address)` beside a server over `Replicas(**options)`."""

    def ask(question, **options):
        tokenizer = load_tokenizer(model_path)
        replicas = Replicas(tokenizer, **options)

        async def run():
            server = RewardModelServer(
                replicas, tokenizer, seed=7, max_prompt_tokens=100, max_response_tokens=10,
                stop_token_ids=[2],
            )  # fmt: skip
            address = await server.start("127.0.0.1")
            try:
                async with asyncio.timeout(60):
                    return await question(address)
            finally:
                await server.close()

        return asyncio.run(run()), replicas

    return ask


def post(address, path, body):
    request = urllib.request.Request(f"http://{address}{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def posted(path, body):
    return lambda address: asyncio.to_thread(post, address, path, body)


HELLO = [{"role": "user", "content": "Hello"}]


def test_a_chat_is_answered_as_openai_does(ask):
    body = {"messages": HELLO, "temperature": 0, "max_tokens": 99, "seed": 3, "stream": False}
    (status, answer), replicas = ask(posted("/v1/chat/completions", body), says="Good")
    assert status == 200
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Good"}
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 5
    [(prompt, params)] = replicas.requests
    assert prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert params == {"max_tokens": 10, "temperature": 0.0, "seed": 3, "stop_token_ids": [2]}


def test_the_same_question_has_the_same_seed(ask):
    def seed_of(body):
        return ask(posted("/v1/chat/completions", body))[1].requests[0][1]["seed"]

    first, again, other = (
        seed_of({"messages": [{"role": "user", "content": text}]}) for text in ("a", "a", "b")
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "n": 2, "tools": []}, "n, tools cannot be"),
        ("/v1/chat/completions", {"messages": []}, "messages must be a list"),
        ("/v1/chat/completions", {"messages": ["x"]}, "chat template refuses the messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 200}]},
         "more than reward.reward_model.rollout.prompt_length=100"),
        ("/classify", {"input": 3}, "input must be a text"),
        ("/classify", {"input": "x" * 200}, "has 200 tokens"),
        ("/classify", [1], "must be a JSON object"),
    ],
)  # fmt: skip
def test_what_cannot_be_answered_says_why(ask, path, body, message):
    (status, answer), replicas = ask(posted(path, body))
    assert (status, replicas.requests) == (400, [])
    assert message in answer["error"]["message"]


def test_a_judge_has_no_scores(ask):
    (status, answer), _ = ask(posted("/classify", {"input": "x"}), has_head=False)
    assert status == 400
    assert "generates text" in answer["error"]["message"]


def score(config, tasks):
    async def question(address):
        rewards = RewardLoopManager(config, address)
        await rewards.start()
        try:
            return await asyncio.gather(
                *(rewards.score(task) for task in tasks), return_exceptions=True
            )
        finally:
            await rewards.close()

    return question


def test_a_discriminative_model_scores_the_whole_conversation(
    ask, make_config, make_task, model_path
):
    config = make_config(reward__reward_model__model_path=model_path, **ENABLED)
    tasks = [make_task(text, messages=HELLO) for text in ("four", "x" * 100, "fourteen")]
    (first, long, second), replicas = ask(score(config, tasks))
    # Its tokens are characters, and four special ones.
    assert first == Reward(score=30.0, extra={"acc": 30.0})
    assert second.score == first.score + 4
    assert isinstance(long, DataError)
    assert "prompt_length=100" in str(long)
    prompt, _ = replicas.requests[0]
    assert prompt == ("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n")


def test_an_outage_of_the_model_is_no_fault_of_the_session(ask, make_config, make_task, model_path):
    config = make_config(reward__reward_model__model_path=model_path, **ENABLED)
    task = make_task(messages=HELLO)
    (outcome,), _ = ask(score(config, [task]), error=ActorUnavailableError("no replica serves"))
    assert isinstance(outcome, ActorUnavailableError)
    assert "answered 503" in str(outcome)
    assert "no replica serves" in str(outcome)

    async def nobody(address):
        return await score(config, [task])("127.0.0.1:9")

    (gone,), _ = ask(nobody)
    assert isinstance(gone, ActorUnavailableError)
    assert "is not there: " in str(gone)


JUDGE = """
import json, urllib.request

def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address,
                  reward_model_tokenizer, bonus):
    question = f"Is {solution_str} right?"
    assert len(reward_model_tokenizer(question)["input_ids"]) == len(question)
    request = urllib.request.Request(
        f"http://{reward_router_address}/v1/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": question}]}).encode(),
    )
    with urllib.request.urlopen(request) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"]
    return {"score": float(said) + bonus, "said": said}
"""


@pytest.fixture
def judge_config(make_config, model_path):
    return make_config(
        JUDGE,
        reward__custom_reward_function__reward_kwargs={"bonus": 1},
        reward__reward_model__model_path=model_path,
        **ENABLED,
    )


def test_a_judges_function_asks_the_model(ask, judge_config, make_task):
    (reward,), replicas = ask(score(judge_config, [make_task("four")]), says="0.25")
    assert reward == Reward(score=1.25, extra={"said": "0.25"})
    assert "Is four right?" in replicas.requests[0][0]


def test_a_judge_that_says_nonsense_fails_its_session(ask, judge_config, make_task):
    (error,), _ = ask(score(judge_config, [make_task("four")]), says="good")
    assert isinstance(error, RewardError)
    assert "could not convert string to float: 'good'" in str(error)


def test_an_outage_under_a_judge_looks_like_one(ask, judge_config, make_task):
    (error,), _ = ask(score(judge_config, [make_task()]), error=ActorUnavailableError("gone"))
    assert isinstance(error, RewardError)
    assert "HTTP Error 503" in str(error)


def test_which_rewards_are_of_a_model(make_config, judge_config, model_path):
    model = {"reward__reward_model__model_path": model_path}
    own_pool = make_config(**model, **ENABLED)
    shared = make_config(**model, reward__reward_model__enable=True)
    assert [is_discriminative(c) for c in (own_pool, judge_config, make_config())] == [
        True, False, False,
    ]  # fmt: skip
    assert [c.scores_later for c in (own_pool, shared, make_config())] == [False, True, False]
    assert not uses_rules(own_pool)


def test_without_its_model_a_scorer_says_so(judge_config):
    assert callable(load_reward_function(judge_config))
    with pytest.raises(ConfigError, match="the reward model runs in a training run only"):
        make_scorer(judge_config)
