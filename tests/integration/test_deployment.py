"""A deployment run as a platform team runs it: a Prefect server, a process worker, a Ray head.

All on loopback, started and ended by the test; the server with authentication, and Ray with its
token on, which a driver that joins by address has to know about.
"""

import json
import time

import psutil
import pytest
from prefect.states import Cancelling

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

CANCEL_S = 25
"""Prefect's worker kills a cancelled run after 30 s; ours has to have freed everything by then."""

HEARD_S = 15
"""A process worker asks the server every 10 s whether a run of its is to be cancelled."""


@pytest.fixture(scope="module")
def site(make_site):
    site = make_site()
    site.ray_address = site.start_ray(num_cpus=16)
    site.rollflow("deploy")
    site.start_worker("rollflow-train")
    return site


def test_a_deployment_run_completes_on_a_cluster_with_a_token(site):
    config = {
        "trainer": {"total_training_steps": 2},
        "ray": {"address": site.ray_address},
    }
    site.run(
        "prefect", "deployment", "run", "train/grpo-smollm2",
        "--params", json.dumps({"preset": "grpo-tiny", "config": config}),
        "--watch", "--watch-timeout", "240",
        timeout_s=300,
    )  # fmt: skip
    # Runs of the schedules wait for their hour.
    states = dict(
        site.query("select name, state_type from flow_run where state_type <> 'SCHEDULED'")
    )
    log = (site.home / "rollflow-train.log").read_text()
    assert set(states.values()) == {"COMPLETED"}, f"{states}\n{log[-6000:]}"
    assert {"step-0001", "step-0002", "rollout-producer-0"} <= states.keys()
    # Paths of the preset are relative, and so is the folder of runs: to the project.
    (run,) = (path for path in (site.root / "runs").iterdir() if path.name != ".prefect")
    attempts = json.loads((run / "run.json").read_text())["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == ["finished"]
    assert (run / "model" / "model.safetensors").exists()
    assert not (run.parent / ".prefect").exists()
    token = (site.home / ".ray" / "auth_token").read_text().strip()
    assert site.password not in log
    assert token not in log


def test_a_cancel_on_the_server_frees_everything_and_is_told_as_one(site):
    finished = set((site.root / "runs").glob("*/run.json"))
    config = {
        "trainer": {
            "total_training_steps": 200, "total_epochs": 100, "test_freq": -1,
            "val_before_train": False, "logger": ["file"],
        },
        "ray": {"address": site.ray_address},
    }  # fmt: skip
    flow_run = site.start_run("train/grpo-smollm2", preset="grpo-tiny", config=config)

    def folder_with_a_step():
        found = set((site.root / "runs").glob("*/run.json")) - finished
        return next((file.parent for file in found if has_step(file.parent)), None)

    def has_step(folder):
        metrics = folder / "metrics.jsonl"
        return metrics.is_file() and '"step": 1,' in metrics.read_text()

    folder = site.until("no step is made", folder_with_a_step)

    def attempt():
        return json.loads((folder / "run.json").read_text())["attempts"][0]

    driver = psutil.Process(attempt()["pid"])
    site.set_state(flow_run, Cancelling())
    began = time.monotonic()
    psutil.wait_procs([driver], timeout=2 * CANCEL_S)
    assert not driver.is_running()
    assert time.monotonic() - began < HEARD_S + CANCEL_S
    # Written when everything is freed: nobody had to kill it.
    assert attempt()["outcome"] == "cancelled"
    site.until_state("train", "Cancelled", timeout_s=60)
