"""A deployment run as a platform team runs it: a Prefect server, a process worker, a Ray head.

All on loopback, started and ended by the test; the server with authentication, and Ray with its
token on, which a driver that joins by address has to know about.
"""

import json
import time

import psutil
import pytest
from prefect.states import Cancelling

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.on_server,
    pytest.mark.timeout(400),
]

CANCEL_S = 25
"""Prefect's worker kills a cancelled run after 30 s; ours has to have freed everything by then."""
HEARD_S = 15
"""A process worker asks the server every 10 s whether a run of its is to be cancelled."""


@pytest.fixture(scope="module")
def site(trainings_site):
    """Another training may have taken the pool's one place, but not the devices of a cluster."""
    trainings_site.limit(pool="rollflow-train", to=2)
    yield trainings_site
    trainings_site.limit(pool="rollflow-train", to=1)


def test_a_deployment_run_completes_on_a_cluster_with_a_token(site, ray_address):
    config = {
        "trainer": {"total_training_steps": 2},
        "ray": {"address": ray_address},
    }
    site.run(
        "prefect", "deployment", "run", "train/nightly",
        "--params", json.dumps({"preset": "grpo-tiny", "config": config}),
        "--flow-run-name", "on-a-cluster", "--watch", "--watch-timeout", "240",
        timeout_s=300,
    )  # fmt: skip
    ((flow_run_id, state),) = site.query(
        "select id, state_type from flow_run where name = 'on-a-cluster'"
    )
    log = site.logs_of(flow_run_id)
    assert state == "COMPLETED", log
    states = dict(
        site.query(
            "select r.name, r.state_type from flow_run r join task_run t "
            "on r.parent_task_run_id = t.id where t.flow_run_id = ?",
            flow_run_id,
        )
    )
    assert set(states.values()) == {"COMPLETED"}, f"{states}\n{log}"
    assert {"step-0001", "step-0002", "rollout-producer-0"} <= states.keys()
    # Paths of the preset are relative, and so is the folder of runs: to the project.
    assert [attempt["outcome"] for attempt in site.attempts()] == ["finished"]
    run = site.run_folder()
    assert (run / "model" / "model.safetensors").exists()
    assert not (run.parent / ".prefect").exists()
    token = (site.home / ".ray" / "auth_token").read_text().strip()
    log += (site.home / "rollflow-train.log").read_text()
    assert site.password not in log
    assert token not in log


def test_a_cancel_on_the_server_frees_everything_and_is_told_as_one(site, ray_address):
    root = "cancelled"
    config = {
        "trainer": {
            "total_training_steps": 200, "total_epochs": 100, "test_freq": -1,
            "val_before_train": False, "logger": ["file"], "runs_root": root,
        },
        "ray": {"address": ray_address},
    }  # fmt: skip
    flow_run = site.start_run("train/nightly", preset="grpo-tiny", config=config)
    site.until_step(1, root)
    driver = psutil.Process(site.attempts(root)[0]["pid"])
    site.set_state(flow_run, Cancelling())
    began = time.monotonic()
    psutil.wait_procs([driver], timeout=2 * CANCEL_S)
    assert not driver.is_running()
    assert time.monotonic() - began < HEARD_S + CANCEL_S
    # Written when everything is freed: nobody had to kill it.
    assert [attempt["outcome"] for attempt in site.attempts(root)] == ["cancelled"]
    site.until("it is not Cancelled", lambda: site.state_of(flow_run) == "Cancelled")
