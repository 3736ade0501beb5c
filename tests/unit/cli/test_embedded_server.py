"""A driver that is killed takes its embedded server along; a server that is killed comes back."""

import os
import subprocess
import sys
import time
import urllib.request

import psutil


def is_gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_the_watcher_ends_the_server_of_a_killed_driver_and_leaves_a_living_one_alone():
    code = (
        "import subprocess, sys, time\n"
        "from flows.command.embedded_server import watch\n"
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


def test_a_server_that_dies_comes_back_at_its_address_and_ends_with_its_driver(tmp_path):
    code = (
        "import time\n"
        "from flows.command.environment import prepare_prefect_environment\n"
        f"prepare_prefect_environment({str(tmp_path)!r})\n"
        "from flows.command.embedded_server import start_embedded_server\n"
        "from prefect.server.api.server import SubprocessASGIServer\n"
        "address = start_embedded_server()\n"
        "first = SubprocessASGIServer().server_process\n"
        "print(address, first.pid, flush=True)\n"
        "while SubprocessASGIServer().server_process is first: time.sleep(0.1)\n"
        "print(SubprocessASGIServer().address, SubprocessASGIServer().server_process.pid,"
        " flush=True)\n"
        "time.sleep(200)\n"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    driver = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert driver.stdout is not None
        address, pid = driver.stdout.readline().split()
        psutil.Process(int(pid)).kill()
        same, second = driver.stdout.readline().split()
        assert same == address
        assert second != pid
        server = psutil.Process(int(second))
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{address}/api/health", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "the server did not come back"
                time.sleep(0.2)
        driver.kill()
        driver.wait()
        while not is_gone(server):
            assert time.monotonic() < deadline, "the second server outlived its driver"
            time.sleep(0.1)
    finally:
        driver.kill()
        driver.communicate()
