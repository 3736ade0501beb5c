"""The environment agent from end to end: a scripted model plays an environment of our own."""

import asyncio
import json

import pytest

from rlcore.agent_loop.check_env import check_environment
from rlcore.data.prepare import prepare_named
from rlcore.data.tokenizer import load_tokenizer
from rlcore.environments.base import EnvironmentSpec, Observation, read_spec
from rlcore.environments.host import EnvironmentHost, Episodes, EpisodeTask
from rlcore.errors import ConfigError, DataError, EnvironmentTimeoutError
from rlcore.testing.scripted_replica import ScriptedReplica, texts_by_mask

# Guess a number; draws from the random sources of the process, as libraries do.
GUESS = """
import os, random, re
import numpy as np
from rlcore.environments.base import ENVIRONMENTS, Observation

@ENVIRONMENTS.register("mine")
class Guess:
    def __init__(self, name, most=9):
        assert name == "guess"
        self.most = most

    def reset(self, seed):
        self.number = random.randint(1, self.most)
        return Observation(text=f"Guess a number up to {self.most}.")

    def step(self, action):
        match action:
            case "raise":
                raise ZeroDivisionError("no")
            case "hang":
                re.fullmatch("(a*)*b", "a" * 64)
            case "die":
                os._exit(7)
            case "megabyte":
                return Observation(text="x" * 1_000_000)
            case "process":
                return Observation(text=str(os.getpid()))
            case "draw":
                return Observation(text=f"{random.random()} {np.random.rand()}")
        if action == str(self.number):
            return Observation(text="Yes.", is_done=True, reward=1.0, is_solved=True)
        hint = "more" if action < str(self.number) else "less"
        return Observation(text=hint, reward=0.25)
"""
SPEC = EnvironmentSpec(library="mine", name="guess", seed=3)


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "guess.py"
    path.write_text(GUESS)
    return str(path)


@pytest.fixture
def play(run_session, make_config, module):
    """Run one session whose model writes `turns` one after the other."""

    def play(turns, spec=SPEC, fields=None, **settings):
        tokenizer = load_tokenizer(make_config().actor_rollout_ref.model.path)
        asked = []

        def write(prompt, seed):
            asked.append(prompt)
            return turns[len(asked) - 1] if isinstance(turns, list) else turns

        replica = ScriptedReplica(tokenizer, write, end_token_id=2, version=3)
        overrides = {
            "data__max_prompt_length": 200,
            "data__max_response_length": 400,
            "actor_rollout_ref__rollout__agent__default_agent_loop": "environment_agent",
            "trainer__user_modules": [module],
        }
        for name, value in settings.items():
            key = name if "__" in name else f"actor_rollout_ref__rollout__multi_turn__{name}"
            overrides[key] = value
        row = {"data_source": "environment/guess", "extra_info": {"environment": spec.to_json()}}
        _, result = run_session(replica, fields={**row, **(fields or {})}, **overrides)
        return tokenizer, result, replica

    return play


def test_an_episode_is_played_to_its_end_and_pays(play):
    # Python's generator seeded with 3 draws 4 from 1 to 9.
    tokenizer, result, replica = play(["2", "7", "4"])
    assert result.record.error_message == ""
    [row] = result.rows
    answer = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    assert texts_by_mask(tokenizer, row) == [
        (1, "2<|im_end|>"), (0, answer.format("more")),
        (1, "7<|im_end|>"), (0, answer.format("less")),
        (1, "4<|im_end|>"),
    ]  # fmt: skip
    assert (result.record.reward, result.record.reward_extra) == (1.0, {"acc": 1.0})
    assert result.record.num_turns == 6  # the first observation, three actions, two answers
    assert row["rm_scores"].tolist() == [0.0] * (len(row["responses"]) - 1) + [1.0]
    # Every turn reads its own tokens and asks for what is left.
    (first, _), _, (last, params) = replica.requests
    num_seen = len(last) - len(first)
    assert last[len(first) :] == row["responses"][:num_seen].tolist()
    assert params["max_tokens"] == 400 - num_seen


def test_an_episode_that_is_not_over_pays_what_it_has(play):
    _, result, _ = play("2", max_assistant_turns=3)
    assert (result.record.reward, result.record.reward_extra["acc"]) == (0.25, 0.0)
    assert result.record.metrics["num_actions"] == 3


def test_the_budget_is_never_exceeded_and_a_turn_that_was_cut_is_no_action(play):
    _, result, _ = play("2" * 30, data__max_response_length=100)
    [row] = result.rows
    assert result.record.metrics["num_actions"] == 2
    assert len(row["responses"]) <= 100
    _, result, _ = play("4" * 30, data__max_response_length=20)
    assert (result.record.reward, result.record.metrics["num_actions"]) == (0.0, 0)


def test_a_megabyte_is_cut(play):
    tokenizer, result, _ = play(["megabyte", "4"], max_tool_response_length=20)
    assert texts_by_mask(tokenizer, result.rows[0])[1][1].count("x") == 20


@pytest.mark.parametrize(
    ("turn", "error_type", "message"),
    [
        ("raise", "TextEnvironmentError", "ZeroDivisionError: no"),
        ("die", "TextEnvironmentError", "the process of the environment died"),
        ("hang", "EnvironmentTimeoutError", "longer than multi_turn.tool_timeout=2 s"),
    ],
)
def test_an_environment_that_fails_fails_its_session(play, turn, error_type, message):
    _, result, _ = play(["2", turn], tool_timeout=2.0)
    assert result.record.error_type == error_type
    assert message in result.record.error_message
    assert result.record.reward is None


@pytest.mark.parametrize(
    ("extra_info", "message"),
    [
        ({}, "extra_info.environment must be JSON"),
        ({"environment": '{"library": "mine"}'}, "extra_info.environment must be JSON"),
        ({"environment": json.dumps({"library": "no", "name": "x", "seed": 1})},
         "unknown environment library 'no'; known: mine, textarena"),
    ],
)  # fmt: skip
def test_a_row_that_names_no_environment_is_told(play, extra_info, message):
    _, result, _ = play(["2"], fields={"extra_info": extra_info})
    assert message in result.record.error_message


def test_a_source_of_environments_without_one_is_told(run_session):
    _, result = run_session(fields={"data_source": "environment/guess"})
    assert "default_agent_loop=environment_agent" in result.record.error_message


def test_an_episode_survives_its_process_and_its_neighbours(make_config, module):
    config = make_config(
        trainer__user_modules=[module],
        actor_rollout_ref__rollout__multi_turn__tool_timeout=20.0,
        actor_rollout_ref__rollout__multi_turn__num_tool_workers=1,
    )

    async def run():
        host = EnvironmentHost(config)

        async def step(episode_id, *actions):
            task = EpisodeTask(episode_id=episode_id, spec=SPEC, actions=actions)
            return (await host.step(task)).text

        alone = [await step("a", *["draw"] * count) for count in (1, 2, 3)]
        mixed = []
        for count in (1, 2, 3):
            mixed.append(await step("b", *["draw"] * count))
            await step("c", *["draw"] * count)
        processes = [await step("d", "process"), await step("d", "process", "process")]
        outcome = await asyncio.gather(step("e", "die"), return_exceptions=True)
        again = await step("a", *["draw"] * 3)
        other = await step("d", "process", "process", "process")
        await host.close()
        return alone, mixed, processes, outcome, again, other

    alone, mixed, processes, outcome, again, other = asyncio.run(run())
    assert len(set(alone)) == 3
    assert mixed == alone
    assert processes[0] == processes[1] != other
    assert "died" in str(outcome[0])
    assert again == alone[-1]


def test_an_episode_is_not_played_twice_in_one_process():
    steps = []

    class Counting:
        def reset(self, seed):
            return Observation(text="go")

        def step(self, action):
            steps.append(action)
            return Observation(text=action)

    class Spec:
        seed = 1

        def make(self):
            return Counting()

    episodes = Episodes()
    for count in range(1, 129):
        episodes(EpisodeTask(episode_id="a", spec=Spec(), actions=("x",) * count))
    assert len(steps) == 128
    # Fewer actions than were played: the episode begins anew.
    episodes(EpisodeTask(episode_id="a", spec=Spec(), actions=("y",)))
    assert steps[-1] == "y"


def test_one_that_hangs_is_in_the_way_of_its_process_only(make_config, module):
    config = make_config(
        trainer__user_modules=[module],
        actor_rollout_ref__rollout__multi_turn__tool_timeout=1.0,
        actor_rollout_ref__rollout__multi_turn__num_tool_workers=2,
    )

    async def run():
        host = EnvironmentHost(config)

        def step(number, action):
            return host.step(
                EpisodeTask(episode_id=f"episode {number}", spec=SPEC, actions=(action,))
            )

        outcomes = await asyncio.gather(
            step(0, "hang"), *(step(i, "2") for i in range(1, 40)), return_exceptions=True
        )
        await host.close()
        return outcomes

    bad, *good = asyncio.run(run())
    assert isinstance(bad, EnvironmentTimeoutError)
    assert {observation.text for observation in good} == {"more"}


def test_specs_are_read_as_they_were_written():
    spec = EnvironmentSpec(library="mine", name="x", seed=4, settings={"most": 5})
    assert read_spec({"environment": spec.to_json()}) == spec
    with pytest.raises(DataError, match="must be JSON with library, name and seed"):
        read_spec(None)


FROZEN_LAKE = {"game": "FrozenLake-v0-random", "size": 6, "test_size": 2}


def test_a_game_of_textarena_becomes_rows_that_can_be_played(tmp_path, make_config):
    [folder] = prepare_named("textarena", str(tmp_path / "lake"), FROZEN_LAKE)
    config = make_config(
        data__train_files=str(folder / "train.parquet"),
        data__val_files=str(folder / "test.parquet"),
        data__max_prompt_length=1500,
        data__max_response_length=1500,
        actor_rollout_ref__rollout__multi_turn__max_tool_response_length=1000,
        actor_rollout_ref__actor__ppo_max_token_len_per_gpu=8192,
    )
    moves = tmp_path / "moves.py"
    moves.write_text("def move(text, seed): return ['[right]', '[down]'][seed % 2]\n")
    report = check_environment(config, num_prompts=3, num_sessions=2, policy=f"{moves}:move")
    assert report.num_failed == 0, [s.result.record.error_message for s in report.sessions]
    assert all(session.result.record.reward is not None for session in report.sessions)
    assert any(session.result.record.num_turns > 2 for session in report.sessions)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({}, ConfigError, "prepare textarena needs game=NAME"),
        ({"game": "NoSuchGame-v0"}, DataError, "textarena has no game 'NoSuchGame-v0'"),
        ({"game": "FrozenLake-v0", "depth": 3}, DataError, "'depth': 3"),
        ({"game": "GuessTheNumber-v0"}, DataError, "too few distinct episodes: 1 first"),
        ({"game": "TicTacToe-v0"}, DataError, "only games for one player"),
    ],
)
def test_what_cannot_be_prepared_is_told_and_nothing_is_written(tmp_path, settings, error, message):
    sizes = {"size": 2, "test_size": 1}
    with pytest.raises(error, match=message):
        prepare_named("textarena", str(tmp_path / "game"), {**sizes, **settings})
    assert not (tmp_path / "game").exists()
