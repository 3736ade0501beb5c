"""A deployment run as a platform team runs it: a Prefect server, a process worker, a Ray head.

All on loopback, started and ended by the test; the server with authentication, and Ray with its
token on, which a driver that joins by address has to know about.
"""

import json

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def site(make_site):
    site = make_site()
    (site.home / ".ray").mkdir()
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
    site.rollflow("deploy")
    site.start_worker("rollflow-train")
    config = {
        "trainer": {"total_training_steps": 2},
        "ray": {"address": f"127.0.0.1:{site.ray_port}"},
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
