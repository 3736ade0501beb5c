"""Whole runs on the tiny model with agent loops other than the default one."""

import json

import pytest

from rlcore.data.prepare import prepare_reasoning_gym, prepare_textarena

pytestmark = [pytest.mark.integration, pytest.mark.slow]

# As verl's users write it: only the import lines are rollflow's.
SEED_LOOP = """
import uuid
from typing import Any
from rlcore.agent_loop import AgentLoopBase, AgentLoopOutput, register

@register("my_agent")
class MyAgentLoop(AgentLoopBase):
    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        prompt_ids = await self.apply_chat_template(messages)
        out = await self.server_manager.generate(
            request_id=uuid, prompt_ids=prompt_ids, sampling_params=sampling_params,
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=out.token_ids,
            response_mask=[1] * len(out.token_ids),
            num_turns=2,
        )
"""
AGENT = "actor_rollout_ref.rollout.agent"


def test_an_agent_loop_written_for_verl_trains(joined):
    (joined.root / "my_agent_loop.py").write_text(SEED_LOOP)
    (joined.root / "my_agents.yaml").write_text(
        "- name: my_agent\n  _target_: my_agent_loop.MyAgentLoop\n"
    )
    code, output = joined.run(
        "train", "grpo-tiny", f"{AGENT}.agent_loop_config_path=my_agents.yaml",
        f"{AGENT}.default_agent_loop=my_agent", "trainer.total_training_steps=2",
        "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1",
        "trainer.runs_root=runs-seed",
    )  # fmt: skip
    assert code == 0, output
    [path] = joined.root.glob("runs-seed/*/metrics.jsonl")
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    assert any(step.get("num_turns/mean") == 2 for step in steps), steps


def test_the_calculator_preset_trains(joined):
    prepare_reasoning_gym("chain_sum", joined.root / "data" / "chain_sum", size=32, test_size=8)
    code, output = joined.run("train", "calculator-tiny", "trainer.runs_root=runs-tools")
    assert code == 0, output
    [path] = joined.root.glob("runs-tools/*/metrics.jsonl")
    steps = [json.loads(line) for line in path.read_text().splitlines()]
    assert any("num_turns/mean" in step for step in steps), steps


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
