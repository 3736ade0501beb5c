"""A run on two replicas by `shm`, one of which is killed: it ends as if nothing had happened."""

import json
import os
import signal

import psutil
import pytest

from rlcore.tracking.curves import read_metrics

pytestmark = [pytest.mark.integration, pytest.mark.slow]

STEPS = 3
ROLLOUT = "actor_rollout_ref.rollout."


def _replicas(family: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in family if any("LLMServerActor" in part for part in p.cmdline())]


def test_a_killed_replica_is_replaced_and_serves_the_present_weights(project):
    process = project.start(
        "train", "grpo-tiny", f"trainer.total_training_steps={STEPS}", "seed=5",
        f"{ROLLOUT}num_replicas=2", f"{ROLLOUT}checkpoint_engine.backend=shm",
        f"{ROLLOUT}checkpoint_engine.update_weights_bucket_megabytes=4",
        f"trainer.default_local_dir={project.root / 'replaced'}",
    )  # fmt: skip
    family = project.until(process, f"step    1/{STEPS}")
    replicas = _replicas(family)
    assert len(replicas) == 2
    os.kill(replicas[0].pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=170)
    assert process.returncode == 0, output[-4000:]
    folder = project.root / "replaced"
    metrics = read_metrics(folder / "metrics.jsonl")
    assert [step for step, row in metrics.items() if "actor/pg_loss" in row] == [1, 2, 3]
    (attempt,) = json.loads((folder / "run.json").read_text())["attempts"]
    assert attempt["outcome"] == "finished"
