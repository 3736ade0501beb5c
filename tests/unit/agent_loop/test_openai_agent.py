"""Agents of the user's, written against OpenAI's client, as sessions of a run."""

import asyncio
import logging
import time

import pytest

from rlcore.agent_loop.check_env import check_environment
from rlcore.agent_loop.openai_agent import OpenAIAgentLoop
from rlcore.data.tokenizer import load_tokenizer
from rlcore.errors import ConfigError, NoReplicaError
from rlcore.rollout.router import Router
from rlcore.testing.scripted_replica import TypingReplica, texts_by_mask

AGENTS = """
import asyncio, time
from pathlib import Path
from openai import AsyncOpenAI, NotFoundError, OpenAI

async def ask(client, messages):
    answer = await client.chat.completions.create(model="any", messages=messages)
    return answer.choices[0].message.model_dump()

def client_of(base_url, api_key):
    return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)

async def agent(base_url, api_key, model, row, result=None):
    async with client_of(base_url, api_key) as client:
        messages = [*row["raw_prompt"]]
        messages += [await ask(client, messages), {"role": "user", "content": row["uid"]}]
        await ask(client, messages)
    return result

def plain(base_url, api_key, model, row):
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        client.chat.completions.create(model=model, messages=row["raw_prompt"])
    return 1

async def forks(base_url, api_key, model, row):
    async with client_of(base_url, api_key) as client:
        first = await ask(client, row["raw_prompt"])
        for word in ("Left", "Right"):
            await ask(client, [*row["raw_prompt"], first, {"role": "user", "content": word}])
    return {"score": 0.5, "acc": 1.0}

async def fails(base_url, api_key, model, row):
    await agent(base_url, api_key, model, row)
    raise ZeroDivisionError("my agent broke")

async def idle(base_url, api_key, model, row):
    return 1.0

def late(base_url, api_key, model, row, path):
    time.sleep(1.0)
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        try:
            client.chat.completions.create(model=model, messages=row["raw_prompt"])
        except NotFoundError as error:
            Path(path).write_text(error.message)

async def few(base_url, api_key):
    ...

number = 3
"""
AGENT = "actor_rollout_ref__rollout__agent__"
ROOM = {"data__max_prompt_length": 300, "data__max_response_length": 300}


@pytest.fixture
def agents(tmp_path):
    """Return the overrides that choose a function of AGENTS."""
    (tmp_path / "mine.py").write_text(AGENTS)

    def agents(function="agent", path="mine.py", **entry):
        text = f"- name: mine\n  _target_: rlcore.agent_loop.OpenAIAgentLoop\n  path: {path}\n"
        text += "".join(f"  {key}: {value}\n" for key, value in entry.items())
        (tmp_path / "agents.yaml").write_text(f"{text}  function: {function}\n")
        return {
            f"{AGENT}agent_loop_config_path": str(tmp_path / "agents.yaml"),
            f"{AGENT}default_agent_loop": "mine",
        }

    return agents


@pytest.fixture
def run_agent(run_session, make_config, agents):
    """Run one session of a function of AGENTS; return (uid, result, tokenizer)."""

    def run_agent(function="agent", write="eee", entry=None, **options):
        tokenizer = load_tokenizer(make_config().actor_rollout_ref.model.path)
        replica = TypingReplica(tokenizer, lambda *_: write, end_token_id=2, version=3)
        overrides = {**ROOM, **agents(function, **(entry or {}))}
        spec, result = run_session(replica, **{**overrides, **options})
        return spec.uid, result, tokenizer

    return run_agent


def test_an_agent_makes_a_trajectory_that_the_runs_rules_score(run_agent):
    uid, result, tokenizer = run_agent(write="aeix")
    assert result.record.error_message == ""
    [row] = result.rows
    assert texts_by_mask(tokenizer, row) == [
        (1, "aeix<|im_end|>"),
        (0, f"\n<|im_start|>user\n{uid}<|im_end|>\n<|im_start|>assistant\n"),
        (1, "aeix<|im_end|>"),
    ]
    assert "Vowels, line" in tokenizer.decode(row["prompts"])
    mask, ids = row["response_mask"], row["responses"]
    assert row["rollout_log_probs"].tolist() == pytest.approx((-mask * ids / 100).tolist())
    assert row["weight_versions"].tolist() == [3 if m else -1 for m in mask.tolist()]
    assert 0 < result.record.reward < 1  # a share of vowels
    assert result.record.num_turns == 4
    assert result.record.metrics["num_requests"] == 2


@pytest.mark.parametrize(
    ("returned", "reward", "extra"),
    [
        ("0.25", 0.25, {"acc": 0.25}),
        ("{score: -1, steps: 7}", -1.0, {"steps": 7}),
        ("{score: 2}", 2.0, {"acc": 2.0}),
    ],
)
def test_what_an_agent_returns_is_its_reward(run_agent, returned, reward, extra):
    _, result, _ = run_agent(entry={"settings": f"{{result: {returned}}}"})
    assert (result.record.reward, result.record.reward_extra) == (reward, extra)
    assert result.rows[0]["rm_scores"][-1] == reward


def test_a_plain_function_runs_in_a_thread(run_agent):
    _, result, tokenizer = run_agent("plain")
    assert (result.record.error_message, result.record.reward) == ("", 1.0)
    assert texts_by_mask(tokenizer, result.rows[0]) == [(1, "eee<|im_end|>")]


def test_a_fork_is_two_rows_with_the_sessions_reward(run_agent):
    uid, result, tokenizer = run_agent("forks")
    assert result.record.keys == [f"{uid}_0_0", f"{uid}_0_1"]
    first, second = result.rows
    assert [m for m, _ in texts_by_mask(tokenizer, first)] == [1, 0, 1]
    assert [m for m, _ in texts_by_mask(tokenizer, second)] == [0, 1]
    assert [float(row["rm_scores"].sum()) for row in result.rows] == [0.5, 0.5]
    assert result.record.metrics["num_requests"] == 3
    assert result.record.metrics["num_trajectories"] == 2


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("fails", {}, "ZeroDivisionError: my agent broke"),
        ("idle", {}, "idle returned without a finished request to the endpoint"),
        ("agent", {"entry": {"settings": "{result: text}"}}, "text"),
        ("agent", {"data__max_response_length": 20}, "leaves none of data.max_response_length=20"),
    ],
)
def test_an_agent_that_fails_fails_its_session(run_agent, caplog, function, options, message):
    caplog.set_level(logging.DEBUG)
    _, result, _ = run_agent(function, **options)
    assert result.record.is_failed
    assert message in result.record.error_message
    assert result.rows == []
    assert "Bearer" not in caplog.text


def test_an_outage_is_not_the_agents_failure(run_agent):
    with pytest.raises(NoReplicaError):
        run_agent(router=Router({}, empty_deadline_s=0.05))


def test_an_agent_that_is_overdue_is_told_that_its_session_is_over(run_agent, tmp_path):
    told = tmp_path / "told.txt"

    def wait():
        deadline = time.monotonic() + 30
        while not (told.exists() and told.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)

    async def until_told():
        await asyncio.to_thread(wait)

    _, result, _ = run_agent(
        "late", entry={"settings": f"{{path: {told}}}"}, after=until_told, deadlines__session=0.3
    )
    assert "not finished after deadlines.session=0.3 s" in result.record.error_message
    assert "has ended" in told.read_text()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"path": "none.py"}, "no such Python file"),
        ({"function": "nothing"}, "defines no 'nothing'"),
        ({"function": "number"}, "'number' is not a function"),
        ({"function": "few"}, "few must take base_url, api_key, model, row: "),
        ({"settings": "{depth: 3}"}, "agent must take base_url, api_key, model, row, depth: "),
        ({"depth": "3"}, "takes path, function and settings, not depth"),
    ],
)
def test_what_an_agent_needs_is_checked_at_the_start(make_config, agents, entry, message):
    config = make_config(**agents(**entry))
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    with pytest.raises(ConfigError, match=message):
        OpenAIAgentLoop.check_at_start(config, tokenizer)


def test_the_loop_without_a_function_is_refused(make_config, agents):
    chosen = {f"{AGENT}default_agent_loop": "openai_agent"}
    for overrides in (chosen, {**agents(), **chosen}):
        config = make_config(**overrides)
        tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
        with pytest.raises(ConfigError, match="openai_agent needs a function of yours"):
            OpenAIAgentLoop.check_at_start(config, tokenizer)


def test_the_host_is_tried_at_the_start(make_config, agents):
    config = make_config(**agents(), **{f"{AGENT}endpoint_host": "192.0.2.1"})
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    with pytest.raises(ConfigError, match=r"endpoint_host=192\.0\.2\.1 is no address of this"):
        OpenAIAgentLoop.check_at_start(config, tokenizer)


def test_a_proxy_that_would_be_asked_is_told_of(make_config, agents, monkeypatch):
    config = make_config(**agents())
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("no_proxy", "")
    [notice] = OpenAIAgentLoop.check_at_start(config, tokenizer)
    assert "NO_PROXY does not name 127.0.0.1" in notice
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert OpenAIAgentLoop.check_at_start(config, tokenizer) == []


def test_sessions_of_an_agent_can_be_looked_at_without_the_model(make_config, agents):
    config = make_config(**ROOM, **agents(), reward__num_workers=1)
    report = check_environment(config, num_prompts=1, num_sessions=2)
    assert report.num_failed == 0
    assert [session.result.record.num_turns for session in report.sessions] == [4, 4]


@pytest.mark.parametrize("name", ["httpx", "httpx2"])
def test_requests_are_no_news_for_the_log_unless_the_user_wants_them(make_config, agents, name):
    config = make_config(**agents())
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    library = logging.getLogger(name)
    before = library.level
    try:
        for level, after in ((logging.NOTSET, logging.WARNING), (logging.DEBUG, logging.DEBUG)):
            library.setLevel(level)
            assert OpenAIAgentLoop.check_at_start(config, tokenizer) == []
            assert library.level == after
    finally:
        library.setLevel(before)
