"""A deployment run as a platform team runs it: a Prefect server, a process worker, a Ray head.

All on loopback, started and ended by the test; the server with authentication, and Ray with its
token on, which a driver that joins by address has to know about.
"""

import json

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.later]

ROOT = "on-a-cluster"


@pytest.fixture
def site(trainings_site):
    site = trainings_site
    (site.home / ".ray").mkdir(exist_ok=True)
    site.ray_port = site.free_port()
    site.run("ray", "get-auth-token", "--generate")
    site.env["RAY_AUTH_MODE"] = "token"
    site.start(
        "ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1",
        f"--port={site.ray_port}", "--num-cpus=16", "--include-dashboard=false",
        "--disable-usage-stats", log="ray.log",
    )  # fmt: skip
    del site.env["RAY_AUTH_MODE"]  # the run finds out by itself
    return site


def test_a_deployment_run_completes_on_a_cluster_with_a_token(site):
    config = {
        "trainer": {"total_training_steps": 2, "runs_root": ROOT},
        "ray": {"address": f"127.0.0.1:{site.ray_port}"},
    }
    site.run(
        "prefect", "deployment", "run", "train/grpo-smollm2", "--flow-run-name", "clustered",
        "--params", json.dumps({"preset": "grpo-tiny", "config": config}),
        "--watch", "--watch-timeout", "240",
        timeout_s=300,
    )  # fmt: skip
    states = dict(
        site.query(
            "select page.name, page.state_type from flow_run page "
            "join task_run call on page.parent_task_run_id = call.id "
            "join flow_run run on call.flow_run_id = run.id where run.name = 'clustered'"
        )
    )
    log = (site.home / "rollflow-train.log").read_text()
    assert set(states.values()) == {"COMPLETED"}, f"{states}\n{log[-6000:]}"
    assert {"step-0001", "step-0002", "rollout-producer-0"} <= states.keys()
    # Paths of the preset are relative, and so is the folder of runs: to the project.
    assert [attempt["outcome"] for attempt in site.attempts(ROOT)] == ["finished"]
    folder = site.run_folder(ROOT)
    assert (folder / "model" / "model.safetensors").exists()
    assert not (folder.parent / ".prefect").exists()
    token = (site.home / ".ray" / "auth_token").read_text().strip()
    assert site.password not in log
    assert token not in log
