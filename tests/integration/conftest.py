"""The tiny project that runs of the integration tests work in; commands and servers as children."""

import asyncio
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import psutil
import pytest
import yaml
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolUpdate
from prefect.client.schemas.objects import State

from rlcore.data.prepare import prepare_tiny

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
T = TypeVar("T")
SECRET = "prefect:only-for-this-test"
END_S = 5.0
OUTAGE_S = 20.0
"""Longer than a step of the long run."""
SERVER = {
    "PREFECT_SERVER_API_AUTH_STRING": SECRET,
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_V2_ENABLED": "true",
    # As deployments/server.env has it: leases outlive the server.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
        "prefect.server.concurrency.lease_storage.filesystem"
    ),
}
USER_CODE = Path(__file__).with_name("user_code")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the end of a run that lasts, and what needs its devices, behind the other tests."""
    items.sort(key=lambda item: item.get_closest_marker("later") is not None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True)
class Project:
    """A folder with the tiny model and data, in which commands run."""

    root: Path
    free_port = staticmethod(free_port)

    def environment(self, **extra: str) -> dict[str, str]:
        # Neither the user's Prefect nor the one of this pytest run.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "RAY_"))}
        return {**kept, "HF_HUB_OFFLINE": "1", "TMPDIR": str(self.root / "tmp"), **extra}

    def start(
        self, *arguments: str, module: str = "flows.cli", **extra: str
    ) -> subprocess.Popen[str]:
        """Start `rollflow ARGUMENTS` in the project."""
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=self.root,
            env=self.environment(**extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def until(self, process: "subprocess.Popen[str]", beginning: str) -> list[psutil.Process]:
        """Read the console up to a line; return the processes that then belong to the run."""
        output = []
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if line.startswith(beginning):
                return psutil.Process(process.pid).children(recursive=True)
        pytest.fail(f"the run ended before {beginning!r}:\n" + "".join(output)[-4000:])

    def run(self, *arguments: str, timeout_s: float = 200, **extra: str) -> tuple[int, str]:
        """Run `rollflow ARGUMENTS` to its end; return exit code and output."""
        process = self.start(*arguments, **extra)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            pytest.fail(f"{arguments} did not end within {timeout_s} s:\n{output[-4000:]}")
        return process.returncode, output


@pytest.fixture(scope="session")
def project(tmp_path_factory) -> Project:
    root = tmp_path_factory.mktemp("p")
    prepare_tiny(root)
    (root / "tmp").mkdir()
    return Project(root)


def end_groups(processes: "list[subprocess.Popen[bytes]]") -> None:
    """End processes that lead a group of their own, the newest first, and what they started.

    All have END_S together: a server waits for its clients, a worker for its runs.
    """
    left = [process for process in processes if process.poll() is None]
    for process in reversed(left):
        os.killpg(process.pid, signal.SIGTERM)
    ends = time.monotonic() + END_S
    for process in left:
        try:
            process.wait(timeout=max(0.1, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=20)


def start_ray_head(
    home: Path, environment: dict[str, str], *, num_cpus: int
) -> "tuple[subprocess.Popen[bytes], str]":
    """Start a Ray cluster in `home`, where its token lies; return process and address."""
    given = {**environment, "HOME": str(home), "PATH": f"{BIN}:{os.environ['PATH']}"}
    (home / ".ray").mkdir(exist_ok=True)
    subprocess.run(
        ["ray", "get-auth-token", "--generate"], env=given, check=True, capture_output=True
    )
    port, log = free_port(), home / "ray.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            ["ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1",
             f"--port={port}", f"--num-cpus={num_cpus}", "--include-dashboard=false",
             "--disable-usage-stats"],
            env={**given, "RAY_AUTH_MODE": "token"}, stdout=file, stderr=subprocess.STDOUT,
            cwd=home, start_new_session=True,
        )  # fmt: skip
    ends = time.monotonic() + 60
    while "Ray runtime started" not in log.read_text():
        if time.monotonic() >= ends or process.poll() is not None:
            end_groups([process])
            pytest.fail(f"Ray did not start:\n{log.read_text()[-4000:]}")
        time.sleep(0.2)
    return process, f"127.0.0.1:{port}"


class Site:
    """A project folder, a Prefect server with authentication, and what a test starts beside it.

    Args:
        project: Has the tiny model and data.
        home: Folder of this site alone.
        settings: File in the project that sets up the server; None: an SQLite database.
        environment: Of all that is started, besides.
    """

    password = SECRET.split(":")[1]
    free_port = staticmethod(free_port)

    def __init__(
        self, project: Project, home: Path, settings: str | None, **environment: str
    ) -> None:
        self.home = home
        self.root = home / "project"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.port = free_port()
        for name in ("deployments", "prefect.yaml"):
            source = REPOSITORY / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, self.root / name)
        for name in ("models", "data"):
            (self.root / name).symlink_to(project.root / name)
        self.settings = settings
        server = SERVER if settings is None else {"PREFECT_API_PASSWORD": self.password}
        self.env = project.environment(
            **server,
            **environment,
            HOME=str(home),
            PREFECT_HOME=str(home / "prefect"),
            PREFECT_API_URL=f"http://127.0.0.1:{self.port}/api",
            PREFECT_API_AUTH_STRING=SECRET,
            PATH=f"{BIN}:{os.environ['PATH']}",
            PYTHONPATH=str(REPOSITORY),
            TMPDIR=str(home / "tmp"),
            PWD=str(self.root),
        )
        (home / "tmp").mkdir()

    def run(self, *command: str, timeout_s: float = 240) -> str:
        """Run a command in the project; return what it printed."""
        done = subprocess.run(
            command, cwd=self.root, env=self.env, capture_output=True, text=True, timeout=timeout_s
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def rollflow(self, *arguments: str) -> str:
        return self.run(sys.executable, "-m", "flows.cli", *arguments)

    def start(self, *command: str, log: str) -> "subprocess.Popen[bytes]":
        with (self.home / log).open("a") as file:
            process = subprocess.Popen(
                command, cwd=self.root, env=self.env, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def start_server(self) -> "subprocess.Popen[bytes]":
        """Start the server and wait until it answers."""
        command = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(self.port)]
        if self.settings is not None:
            line = f"set -a; . {self.settings}; exec {' '.join(command)}"
            command = ["bash", "-euc", line]
        self.server = self.start(*command, log="server.log")
        deadline = time.monotonic() + 240
        while True:
            try:
                with urllib.request.urlopen(f"{self.env['PREFECT_API_URL']}/health", timeout=5):
                    return self.server
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < deadline, (self.home / "server.log").read_text()[-4000:]
                time.sleep(0.5)

    def kill(self, process: "subprocess.Popen[bytes]") -> None:
        """Kill a process and its children at once, as the end of a host does."""
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=20)

    def start_worker(self, pool: str) -> "subprocess.Popen[bytes]":
        return self.start(
            "prefect", "worker", "start", "--pool", pool, "--type", "process",
            log=f"{pool}.log",
        )  # fmt: skip

    def query(self, sql: str, *values: str) -> list[tuple]:
        """Read the server's database."""
        with sqlite3.connect(self.home / "prefect" / "prefect.db", timeout=30) as database:
            return database.execute(sql, values).fetchall()

    def ask(self, question: Callable[[PrefectClient], Awaitable[T]]) -> T:
        """Ask the server something by Prefect's client, in this process."""

        async def asked() -> T:
            async with PrefectClient(self.env["PREFECT_API_URL"], auth_string=SECRET) as client:
                return await question(client)

        return asyncio.run(asked())

    def start_run(self, deployment: str, name: str | None = None, **parameters: Any) -> str:
        """Start a run of a deployment; return the flow run's id."""

        async def made(client: PrefectClient) -> str:
            found = await client.read_deployment_by_name(deployment)
            run = await client.create_flow_run_from_deployment(
                found.id, parameters=parameters, name=name
            )
            return str(run.id)

        return self.ask(made)

    def limit(self, *, pool: str | None = None, deployment: str | None = None, to: int) -> None:
        """Set how many runs of a work pool or a deployment may run at a time."""

        async def put(client: PrefectClient) -> None:
            if pool is not None:
                await client.update_work_pool(pool, WorkPoolUpdate(concurrency_limit=to))
            if deployment is not None:
                found = await client.read_deployment_by_name(deployment)
                await client.update_deployment(found.id, DeploymentUpdate(concurrency_limit=to))

        self.ask(put)

    def emit(self, event: str, resource: str, payload: dict[str, Any]) -> None:
        """Emit an event by the command line."""
        self.run(
            "prefect", "event", "emit", event, "--resource-id", resource,
            "--payload", json.dumps(payload),
        )  # fmt: skip

    def set_state(self, flow_run_id: str, *states: State) -> None:
        """Put a flow run into states, one after the other."""

        async def put(client: PrefectClient) -> None:
            for state in states:
                await client.set_flow_run_state(UUID(flow_run_id), state, force=True)

        self.ask(put)

    def resume(self, flow_run_id: str, **run_input: str) -> None:
        """Resume a paused or suspended flow run."""
        self.ask(lambda client: client.resume_flow_run(UUID(flow_run_id), run_input or None))

    def flow_runs(self, flow: str) -> list[dict]:
        """Return id, name, state and parameters of all runs of a flow, oldest first."""
        rows = self.query(
            "select r.id, r.name, r.state_name, r.parameters from flow_run r join flow f on "
            "r.flow_id = f.id where f.name = ? order by r.created",
            flow,
        )
        names = ("id", "name", "state", "parameters")
        return [dict(zip(names, [*row[:3], json.loads(row[3])], strict=True)) for row in rows]

    def state_of(self, flow_run_id: str) -> str:
        ((state,),) = self.query("select state_name from flow_run where id = ?", flow_run_id)
        return state

    def logs_of(self, flow_run_id: str) -> str:
        """Return the log that the page of a flow run shows."""
        rows = self.query(
            "select message from log where flow_run_id = ? order by timestamp", flow_run_id
        )
        return "\n".join(message for (message,) in rows)

    def run_folder(self, root: str = "runs") -> Path | None:
        """Return the one run folder in a folder of runs, once it is there."""
        found = [path.parent for path in (self.root / root).glob("*/run.json")]
        assert len(found) <= 1, found
        return found[0] if found else None

    def attempts(self, root: str = "runs") -> list[dict[str, Any]]:
        """Return what run.json says of the attempts of the one run."""
        folder = self.run_folder(root)
        return [] if folder is None else json.loads((folder / "run.json").read_text())["attempts"]

    def steps_done(self, root: str = "runs") -> int:
        """Return the newest step in the metrics of the one run."""
        folder = self.run_folder(root)
        file = None if folder is None else folder / "metrics.jsonl"
        lines = file.read_text().splitlines() if file is not None and file.is_file() else []
        return max((json.loads(line)["step"] for line in lines), default=0)

    def until_step(self, step: int, root: str = "runs", timeout_s: float = 300) -> None:
        self.until(f"step {step} is not made", lambda: self.steps_done(root) >= step, timeout_s)

    def until_attempt(self, number: int, outcome: str | None, root: str = "runs") -> None:
        """Wait until an attempt has begun, or ended with an outcome."""

        def is_so() -> bool:
            attempts = self.attempts(root)
            if len(attempts) < number:
                return False
            return outcome is None or attempts[number - 1].get("outcome") == outcome

        self.until(f"attempt {number} is not {outcome or 'begun'}", is_so, 400)

    def until(self, what: str, true, timeout_s: float = 300):
        """Wait until `true()` returns something; fail with the logs otherwise."""
        deadline = time.monotonic() + timeout_s
        while not (found := true()):
            logs = "\n".join(f"{p.name}:\n{p.read_text()[-3000:]}" for p in self.home.glob("*.log"))
            assert time.monotonic() < deadline, f"{what}\n{logs}"
            time.sleep(0.5)
        return found

    def until_state(self, flow: str, state: str, index: int = -1, timeout_s: float = 300) -> dict:
        """Wait until a run of a flow has a state; return the run."""

        def found():
            runs = self.flow_runs(flow)
            return next((run for run in runs[index:][:1] if run["state"] == state), None)

        return self.until(f"{flow} is not {state}: {self.flow_runs(flow)}", found, timeout_s)

    def start_ray(self, *, num_cpus: int) -> str:
        """Start a Ray cluster with a token, of which runs find out by themselves."""
        process, address = start_ray_head(self.home, self.env, num_cpus=num_cpus)
        self.processes.append(process)
        return address

    def end(self) -> None:
        end_groups(self.processes)


@pytest.fixture(scope="session")
def find_port() -> Callable[[], int]:
    return free_port


@pytest.fixture(scope="session")
def ray_head():
    """Return `start_ray_head`; what it starts ends with the tests."""
    started: list[subprocess.Popen[bytes]] = []

    def start(home: Path, environment: dict[str, str], *, num_cpus: int) -> str:
        process, address = start_ray_head(home, environment, num_cpus=num_cpus)
        started.append(process)
        return address

    yield start
    end_groups(started)


@pytest.fixture(scope="session")
def make_site(project, tmp_path_factory):
    """Return a function that makes a site (see Site) with a server; all end with the tests."""
    sites: list[Site] = []

    def make(settings: str | None = None, **environment: str) -> Site:
        home = tmp_path_factory.mktemp("home")
        (home / "project").mkdir()
        sites.append(Site(project, home, settings, **environment))
        sites[-1].start_server()
        return sites[-1]

    yield make
    for site in sites:
        site.end()


STAND_INS = [
    {
        "name": "fake",
        "entrypoint": f"{Path(__file__).with_name('fakes.py')}:fake_{kind}",
        "parameters": {},
        "work_pool": {"name": "rollflow-aux"},
    }
    for kind in ("train", "evaluate")
]


@pytest.fixture(scope="session")
def operated_site(make_site):
    """A site with everything deployed and a worker for what needs no devices.

    Its `retrain` runs stand-ins for training and evaluation.
    """
    site = make_site()
    file = site.root / "prefect.yaml"
    content = yaml.safe_load(file.read_text())
    (retrain,) = (d for d in content["deployments"] if d["name"] == "on-new-data")
    retrain["parameters"] |= {
        "preset": "grpo-tiny",
        "train_with": "fake-train/fake",
        "evaluate_with": "fake-evaluate/fake",
        "root": "retrained",
        "store": "in_use",
    }
    content["deployments"] += STAND_INS
    file.write_text(yaml.safe_dump(content))
    site.deployed = site.rollflow("deploy")
    site.start_worker("rollflow-aux")
    return site


@pytest.fixture(scope="session")
def trainings_site(make_site):
    """A site with everything deployed and a worker for both pools: trainings are real."""
    site = make_site()
    site.rollflow("deploy")
    shutil.copytree(USER_CODE, site.root, dirs_exist_ok=True)
    site.workers = {pool: site.start_worker(pool) for pool in ("rollflow-train", "rollflow-aux")}
    return site


LONG_ROOT = "long"
LONG_STEPS = 120
LONG_CONFIG = {
    "actor_rollout_ref": {"rollout": {"checkpoint_engine": {"backend": "faulty"}}},
    "reward": {"custom_reward_function": {"path": "slow_reward.py"}},
    "trainer": {
        "runs_root": LONG_ROOT,
        "user_modules": ["faulty_engine.py"],
        "total_epochs": LONG_STEPS,
        "total_training_steps": LONG_STEPS,
        "save_freq": 2,
        "test_freq": 2,
        "max_actor_ckpt_to_keep": 1,
    },
}


@dataclass(frozen=True)
class LongRun:
    """A training that goes on for ten minutes beside the other tests, nearly idle.

    Its deployment runs one at a time; its second weight update has failed once.
    """

    site: Site
    flow_run_id: str
    root: str = LONG_ROOT


@pytest.fixture(scope="session")
def long_run(trainings_site) -> LongRun:
    site = trainings_site
    site.limit(deployment="train/grpo-smollm2", to=1)
    flow_run_id = site.start_run(
        "train/grpo-smollm2", name="long", preset="grpo-tiny", config=LONG_CONFIG
    )
    site.until_step(3, LONG_ROOT)
    return LongRun(site, flow_run_id)


@pytest.fixture(scope="session")
def outage(long_run) -> float:
    """Kill the server of the long run, restart it, and return when it was back."""
    site = long_run.site
    site.kill(site.server)
    time.sleep(OUTAGE_S)
    site.start_server()
    return time.monotonic()
