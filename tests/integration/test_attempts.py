"""One run in four attempts of a deployment, on real parts: paused, suspended, terminated, killed.

In the end its weights are bit for bit those of a run that nobody disturbed.
"""

import json
import os
import signal
import time

import pytest
from prefect.states import Paused, Suspended

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 30
CONFIG = {
    "actor_rollout_ref": {"rollout": {"full_determinism": True}},
    "trainer": {
        "total_training_steps": STEPS,
        "total_epochs": 2,
        "save_freq": 4,
        "test_freq": -1,
        "val_before_train": False,
        "max_attempts": 4,
        "logger": ["file"],
    },
}


@pytest.fixture(scope="module")
def site(make_site):
    site = make_site()
    site.rollflow("deploy")
    for pool in ("rollflow-train", "rollflow-aux"):
        site.start_worker(pool)
    return site


def started(site, **config):
    trainer = {**CONFIG["trainer"], **config}
    parameters = {"preset": "grpo-tiny", "config": {**CONFIG, "trainer": trainer}}
    return site.start_run("train/grpo-smollm2", **parameters)


def record(site):
    folders = list((site.root / "runs").glob("*/run.json"))
    return json.loads(folders[0].read_text()) if folders else {"attempts": []}


def steps_done(site):
    (folder,) = (path.parent for path in (site.root / "runs").glob("*/run.json"))
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def until_step(site, step):
    site.until(
        f"step {step} is not made",
        lambda: record(site)["attempts"] and steps_done(site) >= step,
        timeout_s=400,
    )


def until_attempt(site, number, outcome):
    def ended():
        attempts = record(site)["attempts"]
        return len(attempts) >= number and attempts[number - 1].get("outcome") == outcome

    site.until(f"attempt {number} is not {outcome}: {record(site)}", ended, timeout_s=400)


def test_a_run_goes_on_whatever_is_done_to_it_and_ends_with_the_same_weights(site):
    flow_run = started(site)
    # Pause acts between two steps, and the run goes on in the same attempt.
    until_step(site, 1)
    site.set_state(flow_run, Paused(timeout_seconds=900))
    time.sleep(5)
    at = steps_done(site)
    time.sleep(8)
    assert steps_done(site) <= at + 1
    site.resume(flow_run)
    until_step(site, at + 2)

    # Suspend leaves the process after a step; on Resume a worker starts the flow run again.
    site.set_state(flow_run, Suspended(timeout_seconds=900))
    until_attempt(site, 1, "suspended")
    site.resume(flow_run)
    site.until("attempt 2 has not begun", lambda: len(record(site)["attempts"]) == 2)
    at = steps_done(site)
    until_step(site, at + 1)

    # A driver that is killed says nothing; its worker does, and the automation goes on.
    os.kill(record(site)["attempts"][1]["pid"], signal.SIGKILL)
    site.until("attempt 3 has not begun", lambda: len(record(site)["attempts"]) == 3, 400)
    until_step(site, steps_done(site) + 1)

    # SIGTERM, of a host that shuts down: the attempt says so before it ends.
    if steps_done(site) < STEPS - 1:
        os.kill(record(site)["attempts"][2]["pid"], signal.SIGTERM)
        until_attempt(site, 3, "terminated")
        until_attempt(site, 4, "finished")
    else:
        until_attempt(site, 3, "finished")

    pages = [name for (name,) in site.query("select name from flow_run where name like 'step-%'")]
    assert {f"step-{step:04d}" for step in range(1, STEPS + 1)} == set(pages)
    (folder,) = (path.parent for path in (site.root / "runs").glob("*/run.json"))
    disturbed = (folder / "model" / "model.safetensors").read_bytes()

    # The same, undisturbed, and ended by its time limit only after it is done.
    folder.rename(site.home / "disturbed")
    started(site, max_wall_s=3600)
    until_attempt(site, 1, "finished")
    (folder,) = (path.parent for path in (site.root / "runs").glob("*/run.json"))
    assert (folder / "model" / "model.safetensors").read_bytes() == disturbed


def test_the_time_limit_ends_a_run_at_a_steps_boundary_with_all_that_belongs_to_an_end(site):
    for path in (site.root / "runs").glob("*/run.json"):
        path.parent.rename(site.home / f"before-{path.parent.name}")
    started(site, max_wall_s=1, save_freq=-1, steps_per_page="auto")
    until_attempt(site, 1, "finished")
    (folder,) = (path.parent for path in (site.root / "runs").glob("*/run.json"))
    assert steps_done(site) == 1
    assert (folder / "global_step_1" / "trainer.json").is_file()
    assert (folder / "model" / "model.safetensors").is_file()
    assert (folder / "generations" / "step-0001.jsonl").is_file()
    site.until_state("train", "Completed")
