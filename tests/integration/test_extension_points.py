"""Agent loops, samplers and modes as verl's users write them: only import lines are rollflow's."""

import pytest

from rlcore.tracking.curves import read_metrics

pytestmark = [pytest.mark.integration, pytest.mark.slow]

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
SEED_SAMPLER = """
from rlcore.buffer.replay_buffer import ReplayBuffer

class MyReplayBuffer(ReplayBuffer):
    def sample(self, global_steps: int, partition_id: str, batch_size: int):
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        return batch, metrics
"""
SEED_MODE = """
from rlcore.trainer.base import PPOTrainer, register_trainer

@register_trainer("my_mode")
class MyTrainer(PPOTrainer):
    def on_sample_end(self):
        self.checkpoint_manager.sleep_replicas()
    def on_step_end(self):
        if self.global_steps % 2 == 0:
            self.checkpoint_manager.update_weights(self.global_steps)
"""
AGENT = "actor_rollout_ref.rollout.agent"
SAMPLER = "trainer.v1.sampler"


def train(joined, name, *overrides):
    folder = joined.root / "runs-extension" / name
    code, output = joined.run(
        "train", "grpo-tiny", "trainer.val_before_train=false", "trainer.test_freq=-1",
        "trainer.save_freq=-1", f"trainer.default_local_dir={folder}",
        f"trainer.runs_root={joined.root / 'runs-extension'}", *overrides,
    )  # fmt: skip
    assert code == 0, output[-6000:]
    return [
        step
        for step in read_metrics(folder / "metrics.jsonl").values()
        if "critic/score/mean" in step
    ]


@pytest.fixture(scope="module")
def steps_of_both(joined):
    """What a run with an agent loop and a sampler of the user's reports of its steps."""
    (joined.root / "my_agent_loop.py").write_text(SEED_LOOP)
    (joined.root / "my_agents.yaml").write_text(
        "- name: my_agent\n  _target_: my_agent_loop.MyAgentLoop\n"
    )
    (joined.root / "my_sampler.py").write_text(SEED_SAMPLER)
    return train(
        joined, "both", "trainer.total_training_steps=3",
        f"{AGENT}.agent_loop_config_path=my_agents.yaml",
        f"{AGENT}.default_agent_loop=my_agent",
        f"{SAMPLER}.custom_sampler.path=my_sampler.py",
        f"{SAMPLER}.custom_sampler.name=MyReplayBuffer",
        f"{SAMPLER}.max_off_policy_threshold=8",
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.v1.colocate_async.num_warmup_batches=1",
    )  # fmt: skip


def test_an_agent_loop_written_for_verl_trains(steps_of_both):
    assert [step["num_turns/mean"] for step in steps_of_both] == [2, 2, 2]


def test_a_sampler_written_for_verl_trains(steps_of_both):
    assert [step["training/global_step"] for step in steps_of_both] == [1, 2, 3]


def test_a_mode_written_for_verl_trains_and_updates_every_second_step(joined):
    (joined.root / "my_trainer.py").write_text(SEED_MODE)
    steps = train(
        joined, "mode", "trainer.total_training_steps=4",
        "trainer.v1.trainer_mode=my_mode", "trainer.user_modules=[my_trainer.py]",
    )  # fmt: skip
    assert len(steps) == 4
    # Weights are published after steps 2 and 4: step 2 trains on responses of the first weights.
    staleness = [step["training/off_policy/trajectory_staleness_worst/max"] for step in steps]
    assert staleness == [0, 1, 0, 1]
