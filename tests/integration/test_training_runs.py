"""Whole runs of what training can do besides GRPO of all weights: adapters, ReMax, a teacher."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlcore.tracking.curves import read_metrics

pytestmark = [pytest.mark.integration, pytest.mark.training_runs]

# The teacher is what the policy was: there is nothing to learn from it at first.
TEACHER = (
    "distillation.enabled=true",
    "distillation.teacher_models.teacher_model.model_path=models/tiny",
)
DISTILLED = "actor/distillation/"


def trained(joined, *overrides: str) -> tuple[Path, dict[int, dict[str, float]]]:
    """Run the tiny preset to its end; return the run's folder and its metrics by step."""
    before = {path.name for path in (joined.root / "runs").glob("*")}
    code, text = joined.run(
        "train", "grpo-tiny", "trainer.val_before_train=false", "trainer.test_freq=-1", *overrides
    )
    assert code == 0, text[-4000:]
    found = [p for p in (joined.root / "runs").iterdir() if p.name not in before | {".prefect"}]
    assert len(found) == 1
    return found[0], read_metrics(found[0] / "metrics.jsonl")


def test_adapters_train_with_remax_and_a_teacher_and_are_exported_merged(joined):
    folder, steps = trained(
        joined,
        "algorithm.adv_estimator=remax",
        *TEACHER,
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
    )
    assert all(math.isfinite(steps[n]["critic/baselines/mean"]) for n in (1, 2))
    for name in ("loss", "abs_loss", "teacher_kl"):
        assert steps[1][f"{DISTILLED}{name}"] == pytest.approx(0, abs=1e-5)
    assert steps[2][f"{DISTILLED}loss"] > 0
    assert steps[1]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert steps[2]["actor/kl_loss"] > 0
    # the engine got merged weights: its log-probs are the trainer's
    assert steps[2]["training/rollout_probs_diff_max"] < 1e-3
    size = sum(f.stat().st_size for f in (folder / "global_step_2/actor/state").iterdir())
    base = load_file(joined.root / "models/tiny/model.safetensors")
    assert size < 4 * sum(tensor.numel() for tensor in base.values())
    exported = load_file(folder / "model/model.safetensors")
    code, text = joined.run("export", folder.name, "--out", "again", "--step", "2")
    assert code == 0, text
    again = load_file(joined.root / "again/model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in exported.items())
    assert exported.keys() == base.keys()
    moved = [name for name in base if not torch.equal(exported[name].float(), base[name].float())]
    assert moved and all("proj" in name for name in moved)
