"""Whole runs of the asynchronous modes on the tiny model, beside the same run in sync mode."""

import json
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import torch
from real_parts.project import REFERENCE, REFERENCE_STEPS
from safetensors.torch import load_file

from rlcore.tracking.curves import read_metrics
from rlcore.trainer.snapshots import snapshot_root

# A test may set up two whole runs.
pytestmark = [pytest.mark.integration, pytest.mark.async_modes, pytest.mark.timeout(400)]

STEPS = REFERENCE_STEPS
SEPARATE = "trainer.v1.separate_async."
COMMON = tuple(argument for argument in REFERENCE if "save_freq" not in argument)


def places(project, folder):
    """Where a run lies, and Prefect's database if it has its own: apart from other tests' runs."""
    return f"trainer.runs_root={project.root / 'async'}", f"trainer.default_local_dir={folder}"


def train(project, name, *overrides):
    """Run `rollflow train grpo-tiny` to its end; return the run folder."""
    folder = project.root / name
    code, text = project.run("train", "grpo-tiny", *COMMON, *places(project, folder), *overrides)
    assert code == 0, text[-6000:]
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def assert_same_weights(a: Path, b: Path) -> None:
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert different == []


MODES = {
    "colocate_async": ("trainer.v1.trainer_mode=colocate_async",),
    "separate_async": (
        "trainer.v1.trainer_mode=separate_async",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=shm",
    ),
}
EVERY_STEP = {"colocate_async": (), "separate_async": (f"{SEPARATE}parameter_sync_step=1",)}


@pytest.mark.parametrize("mode", MODES)
def test_without_a_pipeline_every_mode_is_bitwise_sync(project, joined, reference_run, mode):
    # On a cluster of its own the replicas of separate_async have cores of their own.
    run = train(
        project if mode == "separate_async" else joined,
        f"{mode}-0",
        *MODES[mode],
        *EVERY_STEP[mode],
        f"trainer.v1.{mode}.num_warmup_batches=0",
        "trainer.v1.sampler.max_off_policy_threshold=1",
        "trainer.save_freq=-1",
    )
    assert_same_weights(run, reference_run)


PIPELINE = (
    "trainer.v1.sampler.max_off_policy_threshold=2",
    "data.max_response_length=48",
    "trainer.total_training_steps=5",
    "trainer.save_freq=2",
)
# Two optimizer steps a step, and responses that are frozen by an update and go on.
INNER_STEPS = {
    "colocate_async": (),
    "separate_async": (
        f"{SEPARATE}parameter_sync_step=2",
        f"{SEPARATE}in_flight_update=True",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        # A teacher looks at what several weight versions sampled; it is what the policy was.
        "distillation.enabled=true",
        "distillation.teacher_models.teacher_model.model_path=models/tiny",
    ),
}


@pytest.fixture(scope="module", params=MODES)
def resumed(request, joined):
    """A run with a pipeline that is killed after step 3 and goes on.

    From snapshot 3; in colocate_async from checkpoint 2, since its snapshot is lost with the host.
    """
    mode = request.param
    folder = joined.root / f"{mode}-1"
    arguments = (
        *COMMON, *MODES[mode], *INNER_STEPS[mode], *PIPELINE, *places(joined, folder)
    )  # fmt: skip
    process = joined.start("train", "grpo-tiny", *arguments)
    family = joined.until(process, "step    3/5", freeze=True)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    psutil.wait_procs(family, timeout=30)
    if mode == "colocate_async":
        shutil.rmtree(snapshot_root(folder))
    code, text = joined.run("train", "grpo-tiny", *arguments)
    assert code == 0, text[-6000:]
    assert ("step-0003/update_actor" in text) == (mode == "colocate_async")
    assert "step-0004/update_actor" in text
    return folder


def test_a_killed_run_goes_on_without_a_second_warm_up(resumed):
    attempts = json.loads((resumed / "run.json").read_text())["attempts"]
    assert [attempt.get("outcome") for attempt in attempts] == [None, "finished"]
    saved = json.loads((resumed / "global_step_5" / "trainer.json").read_text())
    counts = saved["ledger"]["partitions"]
    (train_counts,) = (c for name, c in counts.items() if name.endswith("/train"))
    assert train_counts["counts"] == {"trained": 5 * 4}
    assert train_counts["fed"] == 5 * 4
    assert saved["ledger"]["active_prompts"] == []
    assert saved["state"]["train_position"] == 5 * 4


def test_checkpoint_2_holds_the_pipeline(resumed):
    saved = json.loads((resumed / "global_step_2" / "trainer.json").read_text())
    assert saved["ledger"]["leases"] == []
    # One batch is on its way beyond the two that were trained.
    assert len(saved["ledger"]["active_prompts"]) == 4
    finished = [p for p in saved["ledger"]["active_prompts"] if p["status"] == "finished"]
    assert (resumed / "global_step_2" / "waiting_rows.pt").exists() == bool(finished)


def test_no_token_is_older_than_the_bound(resumed):
    metrics = read_metrics(resumed / "metrics.jsonl")
    worst = "training/off_policy/trajectory_staleness_worst/max"
    # Threshold 2: a token is at most one update old, also where the second attempt leaves out the
    # version number that the first gave to its own step 3.
    assert all(0 <= m[worst] <= 1 for step, m in metrics.items() if step > 0)
    assert max(m[worst] for step, m in metrics.items() if step > 0) == 1
    assert max(m["response_length/max"] for step, m in metrics.items() if step > 0) <= 48


@pytest.mark.parametrize("resumed", ["separate_async"], indirect=True)
def test_a_teacher_is_asked_in_every_step(resumed):
    metrics = read_metrics(resumed / "metrics.jsonl")
    losses = [m["actor/distillation/loss"] for step, m in metrics.items() if step > 0]
    assert len(losses) == 5 and losses[0] < losses[-1]
    assert all("actor/distillation/teacher_kl" in m for step, m in metrics.items() if step > 0)


# In separate_async it is a matter of time whether an update falls into a response.
@pytest.mark.parametrize("resumed", ["colocate_async"], indirect=True)
def test_responses_span_versions(resumed):
    metrics = read_metrics(resumed / "metrics.jsonl")
    spans = "training/off_policy/trajectory_spans/max"
    assert max(m[spans] for step, m in metrics.items() if step > 0) == 2


def test_a_killed_replica_is_replaced_while_prompts_of_several_steps_are_on_their_way(project):
    """It is the only one, and generates ahead: its requests go on with the one that comes."""
    folder = project.root / "replaced-async"
    process = project.start(
        "train", "grpo-tiny", *COMMON, *MODES["separate_async"], *EVERY_STEP["separate_async"],
        "trainer.v1.sampler.max_off_policy_threshold=2", "data.max_response_length=48",
        "trainer.save_freq=3", *places(project, folder),
    )  # fmt: skip
    family = project.until(process, f"step    1/{STEPS}")
    (replica,) = [p for p in family if any("LLMServerActor" in part for part in p.cmdline())]
    os.kill(replica.pid, signal.SIGKILL)
    output, _ = process.communicate(timeout=170)
    assert process.returncode == 0, output[-6000:]
    assert output.count("it is taken out and replaced") == 1, output[-6000:]
    (attempt,) = json.loads((folder / "run.json").read_text())["attempts"]
    assert attempt["outcome"] == "finished"
    saved = json.loads((folder / f"global_step_{STEPS}" / "trainer.json").read_text())
    (counts,) = (
        c["counts"] for n, c in saved["ledger"]["partitions"].items() if n.endswith("/train")
    )
    assert counts["trained"] == STEPS * 4
    # None has failed: a prompt waits, or is on its way, or was trained.
    assert {name for name, count in counts.items() if count} <= {
        "trained", "finished", "pending", "running"
    }  # fmt: skip
    metrics = read_metrics(folder / "metrics.jsonl")
    worst = "training/off_policy/trajectory_staleness_worst/max"
    assert [m[worst] <= 1 for step, m in metrics.items() if step > 0] == [True] * STEPS
