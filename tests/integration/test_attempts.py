"""One run in five attempts of a deployment, on real parts: paused, suspended, terminated, killed.

In the end its weights are bit for bit those of a run that nobody disturbed.
"""

import os
import signal
import sys
import time

import pytest
from prefect.states import Paused, Suspended

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.on_server,
    pytest.mark.later,
    pytest.mark.timeout(900),
]

STEPS = 30
ROOT = "troubled"
OVERRIDES = {
    "actor_rollout_ref.rollout.full_determinism": True,
    "trainer.total_training_steps": STEPS,
    "trainer.total_epochs": 3,
    "trainer.save_freq": 4,
    "trainer.test_freq": -1,
    "trainer.val_before_train": False,
    "trainer.max_attempts": 5,
    "trainer.logger": ["file"],
}


def weights(site, root):
    return (site.run_folder(root) / "model" / "model.safetensors").read_bytes()


def train_by_hand(site, root):
    """Train the same without a deployment, from the command line, on the same server."""
    given = [f"{key}={value}" for key, value in OVERRIDES.items() if key != "trainer.logger"]
    return site.start(
        sys.executable, "-m", "flows.cli", "train", "grpo-tiny", *given,
        "trainer.logger=[file]", f"trainer.runs_root={root}", log=f"{root}.log",
    )  # fmt: skip


def test_a_run_goes_on_whatever_is_done_to_it_and_ends_with_the_same_weights(trainings_site):
    site = trainings_site
    flow_run = site.start_run(
        "train/nightly",
        preset="grpo-tiny",
        overrides={**OVERRIDES, "trainer.runs_root": ROOT},
    )
    # Pause acts between two steps, and the run goes on in the same attempt.
    site.until_step(1, ROOT, timeout_s=400)
    site.set_state(flow_run, Paused(timeout_seconds=900))
    time.sleep(5)
    at = site.steps_done(ROOT)
    time.sleep(5)
    assert site.steps_done(ROOT) <= at + 1
    site.resume(flow_run)
    site.until_step(at + 2, ROOT)

    # Suspend leaves the process after a step; on Resume a worker starts the flow run again.
    site.set_state(flow_run, Suspended(timeout_seconds=900))
    site.until_attempt(1, "suspended", ROOT)
    site.resume(flow_run)
    site.until_attempt(2, None, ROOT)
    site.until_step(site.steps_done(ROOT) + 1, ROOT)

    # A driver that is killed says nothing; its worker does, and the automation goes on.
    os.kill(site.attempts(ROOT)[1]["pid"], signal.SIGKILL)
    site.until_attempt(3, None, ROOT)
    site.until_step(site.steps_done(ROOT) + 1, ROOT)

    # SIGTERM, of a host that shuts down: the attempt says so before it ends.
    assert site.steps_done(ROOT) < STEPS - 10
    os.kill(site.attempts(ROOT)[2]["pid"], signal.SIGTERM)
    site.until_attempt(3, "terminated", ROOT)
    site.until_attempt(4, None, ROOT)
    site.until_step(site.steps_done(ROOT) + 1, ROOT)

    # A host that dies says nothing at all: no beat comes any more, and the automation crashes the
    # run. Meanwhile the devices are free: the same is trained there, undisturbed.
    assert site.steps_done(ROOT) < STEPS - 1
    driver = site.attempts(ROOT)[3]["pid"]
    site.kill(site.workers["rollflow-train"])
    os.kill(driver, signal.SIGKILL)
    assert "outcome" not in site.attempts(ROOT)[3]
    undisturbed = train_by_hand(site, "undisturbed")
    site.workers["rollflow-train"] = site.start_worker("rollflow-train")
    site.until_attempt(5, "finished", ROOT)
    assert undisturbed.wait(timeout=300) == 0
    assert weights(site, ROOT) == weights(site, "undisturbed")

    names = [name for (name,) in site.query("select name from flow_run where name like 'step-%'")]
    assert {f"step-{step:04d}" for step in range(1, STEPS + 1)} <= set(names)
    starts = [run["name"] for run in site.flow_runs("train") if ROOT in str(run["parameters"])]
    run_id = site.run_folder(ROOT).name
    assert starts[1:] == [f"{run_id}-attempt-{number}" for number in (3, 4, 5)]
