"""Ports for, and the end of, what tests start beside themselves; a Ray cluster with a token."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent
END_S = 5.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
             "--disable-usage-stats",
             # As a local cluster of a run has it: see rlcore/cluster/connect.py.
             "--system-config", '{"worker_niceness": 0}'],
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
