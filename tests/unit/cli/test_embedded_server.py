"""A driver that is killed takes its embedded server along, and nobody else's."""

import os
import subprocess
import sys
import time

import psutil

from flows.embedded_server import MARK, SERVER

SLEEPER = "import time; time.sleep(120)"


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_watcher_ends_the_server_of_a_killed_driver_only():
    # A driver that starts a "server": a process whose command line and environment look like one.
    code = (
        "import subprocess, sys, time\n"
        "from flows.embedded_server import watch_embedded_server\n"
        "watch_embedded_server()\n"
        f"s = subprocess.Popen([sys.executable, '-c', {SLEEPER!r}, {SERVER!r}])\n"
        "print(s.pid, flush=True)\n"
        "time.sleep(120)\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, SERVER], env={**os.environ, MARK: "another-driver"}
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        server = psutil.Process(int(driver.stdout.readline()))
        time.sleep(0.5)
        assert server.is_running()
        driver.kill()
        driver.wait()
        wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
        assert other.poll() is None
    finally:
        driver.kill()
        driver.communicate()
        other.kill()
        other.wait()
