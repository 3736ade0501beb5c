"""Samplers and modes that verl's users write, with only their import lines changed."""

import pytest

from rlcore.tracking.curves import read_metrics

pytestmark = [pytest.mark.integration, pytest.mark.slow]

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


def test_a_sampler_written_for_verl_trains(joined):
    (joined.root / "my_sampler.py").write_text(SEED_SAMPLER)
    steps = train(
        joined, "sampler", "trainer.total_training_steps=3",
        f"{SAMPLER}.custom_sampler.path=my_sampler.py",
        f"{SAMPLER}.custom_sampler.name=MyReplayBuffer",
        f"{SAMPLER}.max_off_policy_threshold=8",
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.v1.colocate_async.num_warmup_batches=1",
    )  # fmt: skip
    assert [step["training/global_step"] for step in steps] == [1, 2, 3]


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
