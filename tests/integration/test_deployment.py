"""A deployment run as a platform team runs it: a Prefect server, a process worker, a Ray head.

All on loopback, started and ended by the test; the server with authentication, and Ray with its
token on, which a driver that joins by address has to know about. Cancelled: test_a_long_run.py.
"""

import json

import pytest

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.on_server,
    pytest.mark.timeout(400),
]


def test_a_deployment_run_completes_on_a_cluster_with_a_token(trainings_site, ray_address):
    site = trainings_site
    # Another training may have taken the pool's place, but not these devices.
    site.limit(pool="rollflow-train", to=2)
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
    site.limit(pool="rollflow-train", to=1)
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
