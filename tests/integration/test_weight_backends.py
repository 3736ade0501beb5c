"""Whole runs by every backend of weight updates, and one whose only replica is killed.

All are the same run under `full_determinism`: what the weights travel by changes nothing, nor does
a replica that dies.
"""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from rlcore.tracking.curves import read_metrics

pytestmark = pytest.mark.integration

STEPS = 3
ENGINE = "actor_rollout_ref.rollout.checkpoint_engine."


def overrides(project, name: str, backend: str) -> tuple[str, ...]:
    return (
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "actor_rollout_ref.rollout.full_determinism=True",
        "seed=5",
        f"{ENGINE}backend={backend}",
        f"trainer.runs_root={project.root / 'weights'}",
        f"trainer.default_local_dir={project.root / name}",
    )


def train(project, backend: str, *more: str) -> Path:
    code, text = project.run("train", "grpo-tiny", *overrides(project, backend, backend), *more)
    assert code == 0, text[-6000:]
    return project.root / backend


@pytest.fixture(scope="module")
def by_naive(project) -> Path:
    return train(project, "naive")


def assert_same_run(a: Path, b: Path) -> None:
    first, second = (load_file(run / "model" / "model.safetensors") for run in (a, b))
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    versions = [
        [m.get("checkpoint_engine/version") for m in read_metrics(run / "metrics.jsonl").values()]
        for run in (a, b)
    ]
    assert versions[0] == versions[1] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("backend", "more"),
    [
        ("shm", ("actor_rollout_ref.rollout.num_replicas=2",)),
        ("gloo", (f"+{ENGINE}engine_kwargs.gloo.host=127.0.0.1",)),
        ("mooncake", (f"{ENGINE}update_weights_bucket_megabytes=1",)),
    ],
)
def test_a_run_ends_with_the_same_weights_whatever_they_travel_by(project, by_naive, backend, more):
    assert_same_run(train(project, backend, *more), by_naive)


def test_a_killed_replica_comes_back_and_the_run_ends_as_if_nothing_had_happened(project, by_naive):
    """It is the only one: nothing is generated before another serves the present weights."""
    arguments = overrides(project, "replaced", "shm")
    process = project.start("train", "grpo-tiny", *arguments)
    family = project.until(process, f"step    1/{STEPS}")
    (replica,) = replicas_among(family)
    os.kill(replica.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=170)
    assert process.returncode == 0, output[-6000:]
    folder = project.root / "replaced"
    assert_same_run(folder, by_naive)
    (attempt,) = json.loads((folder / "run.json").read_text())["attempts"]
    assert attempt["outcome"] == "finished"


def replicas_among(family: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in family if any("LLMServerActor" in part for part in p.cmdline())]
