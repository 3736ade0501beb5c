"""A deployment run as a platform team runs it: a Prefect server, a process worker, a Ray head.

All on loopback, started and ended by the test; Ray with its token on, which a driver that joins by
address has to know about.
"""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Site:
    """The servers of the test and the environment in which commands find them."""

    def __init__(self, project, home):
        self.home = home
        self.port = free_port()
        self.processes = []
        self.env = project.environment(
            HOME=str(home),
            PREFECT_HOME=str(home / "prefect"),
            PREFECT_API_URL=f"http://127.0.0.1:{self.port}/api",
            PREFECT_SERVER_ANALYTICS_ENABLED="false",
            PATH=f"{BIN}:{os.environ['PATH']}",
        )
        self.env.pop("TMPDIR")

    def run(self, *command, timeout_s=120, cwd=REPOSITORY):
        done = subprocess.run(
            command, cwd=cwd, env=self.env, capture_output=True, text=True, timeout=timeout_s
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def start(self, *command, log):
        file = (self.home / log).open("w")
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=self.env, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self.processes.append(process)
        return process

    def wait_for_server(self):
        deadline = time.monotonic() + 90
        while True:
            try:
                with urllib.request.urlopen(f"{self.env['PREFECT_API_URL']}/health", timeout=5):
                    return
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < deadline, (self.home / "server.log").read_text()[-4000:]
                time.sleep(0.5)

    def end(self):
        for process in reversed(self.processes):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=20)


@pytest.fixture(scope="module")
def site(project, tmp_path_factory):
    site = Site(project, tmp_path_factory.mktemp("home"))
    (site.home / ".ray").mkdir()
    site.ray_port = free_port()
    try:
        site.start(
            "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(site.port),
            "--no-ui", log="server.log",
        )  # fmt: skip
        site.run("ray", "get-auth-token", "--generate")
        site.env["RAY_AUTH_MODE"] = "token"
        site.start(
            "ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1",
            f"--port={site.ray_port}", "--num-cpus=16", "--include-dashboard=false",
            "--disable-usage-stats", log="ray.log",
        )  # fmt: skip
        del site.env["RAY_AUTH_MODE"]  # the run finds out by itself
        site.wait_for_server()
        yield site
    finally:
        site.end()


def test_a_deployment_run_completes_on_a_cluster_with_a_token(site, project):
    site.run("prefect", "work-pool", "create", "rollflow-train", "--type", "process")
    site.run("prefect", "--no-prompt", "deploy", "--name", "grpo-smollm2")
    site.start(
        "prefect", "worker", "start", "--pool", "rollflow-train", "--type", "process",
        log="worker.log",
    )  # fmt: skip
    overrides = {
        "trainer.total_training_steps": 2,
        "actor_rollout_ref.model.path": str(project.root / "models/tiny"),
        "data.train_files": str(project.root / "data/tiny/train.parquet"),
        "data.val_files": str(project.root / "data/tiny/test.parquet"),
        "trainer.runs_root": str(site.home / "runs"),
        "ray.address": f"127.0.0.1:{site.ray_port}",
    }
    site.run(
        "prefect", "deployment", "run", "train/grpo-smollm2",
        "--params", json.dumps({"preset": "grpo-tiny", "overrides": overrides}),
        "--watch", "--watch-timeout", "240",
        timeout_s=240,
    )  # fmt: skip
    database = sqlite3.connect(site.home / "prefect" / "prefect.db")
    flows = database.execute("select name, state_type from flow_run").fetchall()
    states = dict(flows)
    log = (site.home / "worker.log").read_text()[-6000:]
    assert set(states.values()) == {"COMPLETED"}, f"{states}\n{log}"
    assert {"step-0001", "step-0002", "rollout-producer-0"} <= states.keys()
    (run,) = (site.home / "runs").iterdir()
    attempts = json.loads((run / "run.json").read_text())["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == ["finished"]
    assert (run / "model" / "model.safetensors").exists()
    assert not (run.parent / ".prefect").exists()
