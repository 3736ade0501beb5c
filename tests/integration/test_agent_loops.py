"""Whole runs on the tiny model with agent loops other than the default one."""

import json
from pathlib import Path

import pytest

from rlcore.data.prepare import prepare_reasoning_gym, prepare_textarena

pytestmark = [pytest.mark.integration, pytest.mark.slow]

AGENT = "actor_rollout_ref.rollout.agent"
AGENTS = Path(__file__).resolve().parents[2] / "deployments" / "agents" / "agents.yaml"


def test_the_calculator_preset_trains(joined):
    prepare_reasoning_gym("chain_sum", joined.root / "data" / "chain_sum", size=32, test_size=8)
    code, output = joined.run("train", "calculator-tiny", "trainer.runs_root=runs-tools")
    assert code == 0, output
    [path] = joined.root.glob("runs-tools/*/metrics.jsonl")
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    trained = [step for step in steps if "num_turns/mean" in step]
    assert [step["actor/optimizer_steps"] for step in trained] == [1, 1], steps
    # The model is told of the tool; whether one with random weights calls it is chance.
    assert all(step["prompt_length/min"] > 500 for step in trained), steps


def test_the_preset_of_an_agent_of_openais_client_trains(joined):
    prepare_reasoning_gym("chain_sum", joined.root / "data" / "chain_sum", size=32, test_size=8)
    code, output = joined.run(
        "train", "openai-agent-tiny", f"{AGENT}.agent_loop_config_path={AGENTS}",
        "trainer.runs_root=runs-openai",
    )  # fmt: skip
    assert code == 0, output
    [path] = joined.root.glob("runs-openai/*/metrics.jsonl")
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    # Two questions and two answers in one trajectory, whatever the model says.
    turns = [step["num_turns/mean"] for step in steps if "num_turns/mean" in step]
    assert turns == [4.0, 4.0], steps
    # A client's own news of its requests are none for the run's log.
    assert "HTTP Request" not in output


def test_the_frozen_lake_preset_trains(joined):
    prepare_textarena(
        "FrozenLake-v0-random", joined.root / "data" / "frozenlake-v0-random", size=16, test_size=4
    )
    code, output = joined.run("train", "frozen-lake-tiny", "trainer.runs_root=runs-lake")
    assert code == 0, output
    [path] = joined.root.glob("runs-lake/*/metrics.jsonl")
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    # The environment answers what the model says, whatever it is.
    assert all(step["num_turns/max"] > 2 for step in steps if "num_turns/max" in step)
    assert sum("num_turns/max" in step for step in steps) == 2, steps
