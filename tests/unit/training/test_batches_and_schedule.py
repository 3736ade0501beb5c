"""Cutting of batches, the learning-rate schedule, the spec and the version counter."""

import math
from pathlib import Path

import pytest
import torch

from rlcore.config import load_config
from rlcore.config.actor import OptimConfig
from rlcore.errors import CheckpointError, ConfigError
from rlcore.training.batches import MicroBatchLimits, micro_batches, mini_batches
from rlcore.training.schedule import LearningRate
from rlcore.training.spec import TrainingSpec
from rlcore.training.versions import WeightVersions


def test_mini_batches_are_whole_groups():
    groups = ["a", "b", "a", "c", "b", "d", "e"]
    assert mini_batches(groups, 2) == [[0, 2, 1, 4], [3, 5], [6]]
    shuffled = [mini_batches(groups, 2, shuffle_seed=seed) for seed in range(5)]
    assert shuffled[0] == mini_batches(groups, 2, shuffle_seed=0)
    assert any(order != shuffled[0] for order in shuffled)
    for order in shuffled:
        assert sorted(row for batch in order for row in batch) == list(range(7))


def test_micro_batches_keep_prompts_together_and_the_limits():
    a, b = torch.arange(4), torch.arange(10, 16)
    rows = {"prompts": [a, b, a, b], "responses": [torch.arange(n) for n in (2, 3, 2, 1)]}

    def cut(packing, indices=range(4), **limits) -> list[list[int]]:
        full = MicroBatchLimits(**{"max_rows": None, "max_tokens": 100, **limits})
        return list(micro_batches(rows, indices, packing, full))

    assert cut("shared_prefix") == [[1, 3, 0, 2]]
    assert cut("shared_prefix", max_rows=3) == [[1, 3, 0], [2]]
    # packed: 6 + 3 + 1 = 10 tokens and 4 + 2 + 2 = 8; padded: 2 x 9 and 2 x 6
    assert cut("shared_prefix", max_tokens=10) == [[1, 3], [0, 2]]
    assert cut("padded", max_tokens=18) == [[1, 3], [0, 2]]
    assert cut("padded", max_tokens=17) == [[1], [3, 0], [2]]
    assert cut("shared_prefix", max_tokens=1, indices=[2, 0]) == [[0], [2]]


def test_the_schedule_by_hand():
    rate = LearningRate(peak=4.0, warmup_steps=2, kind="cosine", total_steps=6)
    half = 4 * 0.5 * (1 + math.cos(math.pi / 4))
    assert [rate.at(n) for n in (0, 1, 2, 3, 4, 6, 9)] == pytest.approx([0, 2, 4, half, 2, 0, 0])
    assert LearningRate(peak=4.0).at(0) == 4
    optim = OptimConfig(lr=1.0, lr_warmup_steps_ratio=0.5)
    assert LearningRate.from_config(optim, 9).warmup_steps == 4
    assert LearningRate.from_config(OptimConfig(lr_warmup_steps=3), None).warmup_steps == 3
    with pytest.raises(ConfigError, match="lr_warmup_steps_ratio needs the number of steps"):
        LearningRate.from_config(optim, None)
    with pytest.raises(ConfigError, match="cosine needs the number of steps"):
        LearningRate(peak=1.0, kind="cosine")


def test_the_spec_takes_its_values_from_the_configuration():
    config = load_config(
        "grpo-tiny",
        [
            "actor_rollout_ref.actor.optim.lr=3e-4",
            "actor_rollout_ref.actor.clip_ratio_high=0.28",
            "actor_rollout_ref.rollout.temperature=0.7",
            "actor_rollout_ref.rollout.full_determinism=true",
            "ray.num_threads=2",
            "seed=5",
        ],
    )
    spec = TrainingSpec.from_config(config, run_id="r", attempt=2, folder=Path("runs/r"))
    assert spec.learning_rate.at(10**6) == 3e-4
    assert spec.loss_mode == "vanilla"
    assert spec.loss_settings == {
        "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, "agg": "token-mean",
    }  # fmt: skip
    assert (spec.temperature, spec.seed, spec.num_threads, spec.attempt) == (0.7, 5, 2, 2)
    assert spec.full_determinism and spec.folder == "runs/r"
    assert spec.loss_scale_factor == config.data.max_response_length
    assert spec.mini_batch_groups == config.actor_rollout_ref.actor.ppo_mini_batch_size


def test_versions_are_never_given_twice(tmp_path: Path):
    path = tmp_path / "run" / "weight_version"
    versions = WeightVersions(path)
    assert (versions.newest, versions.current(), versions.current()) == (-1, 0, 0)
    versions.state_changed()
    assert (versions.current(), versions.newest) == (1, 1)
    later = WeightVersions(path)
    later.restore(0)
    # Not 1, which is the newest of all: another attempt's.
    assert (later.present, later.current()) == (0, 0)
    later.state_changed()
    assert (later.present, later.current(), later.skipped) == (2, 2, [1])
    later.state_changed()
    assert (later.current(), later.skipped) == (3, [1])
    third = WeightVersions(path)
    third.restore(2, [1])
    third.state_changed()
    assert (third.current(), third.skipped) == (4, [1, 3])
    path.write_text("two")
    with pytest.raises(CheckpointError, match="'two' is not a weight version"):
        WeightVersions(path).current()
