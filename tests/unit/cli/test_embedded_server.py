"""A driver that is killed takes its embedded server along."""

import subprocess
import sys
import time

import psutil


def is_gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_the_watcher_ends_the_server_of_a_killed_driver_and_leaves_a_living_one_alone():
    code = (
        "import subprocess, sys, time\n"
        "from flows.embedded_server import watch\n"
        "s = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)'])\n"
        "watch(s.pid)\n"
        "print(s.pid, flush=True)\n"
        "time.sleep(120)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        server = psutil.Process(int(driver.stdout.readline()))
        time.sleep(1)
        assert not is_gone(server)
        driver.kill()
        driver.wait()
        deadline = time.monotonic() + 30
        while not is_gone(server):
            assert time.monotonic() < deadline, "the server outlived its driver"
            time.sleep(0.1)
    finally:
        driver.kill()
        driver.communicate()
