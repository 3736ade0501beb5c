"""What a platform team has: a project folder, a Prefect server, workers, a Ray cluster."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from real_parts.processes import BIN, REPOSITORY, end_groups, start_ray_head
from real_parts.project import Project
from real_parts.server import SECRET, ServerOfTests

SERVER = {
    "PREFECT_SERVER_API_AUTH_STRING": SECRET,
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_V2_ENABLED": "true",
    # As deployments/server.env has it: leases outlive the server.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
        "prefect.server.concurrency.lease_storage.filesystem"
    ),
}


class Site(ServerOfTests):
    """A project folder, a Prefect server with authentication, and what a test starts beside it.

    Args:
        project: Has the tiny model and data.
        home: Folder of this site alone.
        settings: File in the project that sets up the server; None: an SQLite database.
        environment: Of all that is started, besides.
    """

    password = SECRET.split(":")[1]

    def __init__(
        self, project: Project, home: Path, settings: str | None, **environment: str
    ) -> None:
        super().__init__(home)
        self.root = home / "project"
        self.processes: list[subprocess.Popen[bytes]] = []
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
            PREFECT_API_URL=self.url,
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
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
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

    def emit(self, event: str, resource: str, payload: dict[str, Any]) -> None:
        """Emit an event by the command line."""
        self.run(
            "prefect", "event", "emit", event, "--resource-id", resource,
            "--payload", json.dumps(payload),
        )  # fmt: skip

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

    def start_ray(self, *, num_cpus: int) -> str:
        """Start a Ray cluster with a token, of which runs find out by themselves."""
        process, address = start_ray_head(self.home, self.env, num_cpus=num_cpus)
        self.processes.append(process)
        return address

    def end(self) -> None:
        end_groups(self.processes)
