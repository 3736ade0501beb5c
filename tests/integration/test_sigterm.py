"""SIGTERM of a process that has started Ray: Python hears of it, so that a run can be freed."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

CODE = """
import asyncio, os, signal, sys
import ray
from tasks.signals import sigterm_kept

def heard(number, frame):
    print("heard", flush=True)
    sys.exit(7)

def start():
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)

async def main():
    signal.signal(signal.SIGTERM, heard)
    async with sigterm_kept():
        await asyncio.to_thread(start)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_python_hears_sigterm_after_ray_has_started():
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=200
    )
    assert "heard" in done.stdout, done.stderr[-3000:]
    assert done.returncode == 7
