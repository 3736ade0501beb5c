"""Prefect's temporary server, started by us so that it neither dies too early nor lives too long.

Too early: Ctrl-C in a terminal reaches the whole process group, and a server that ends with it
cannot take the run's last states any more; so it starts with SIGINT blocked (Prefect ends it by
SIGTERM). Too long: Prefect stops it when the interpreter exits, which a SIGKILL of the driver
skips; so a watcher holds a pipe to the driver and ends the server when the pipe breaks. Else it
would live on over the database that the next attempt opens.
"""

import atexit
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from flows.command.environment import LOOPBACK, prefect_home, ui_environment
from rlcore.errors import ConfigError, DeadlineExceededError

logger = logging.getLogger(__name__)

START_S = 120
STOP_S = 10.0
NICENESS = 10
LOOK_EVERY_S = 1.0

_watchers: list[subprocess.Popen[bytes]] = []
"""Kept, since a Popen that is collected closes the pipe."""


def start_embedded_server() -> str:
    """Start the temporary server that this process's flows will use; return its address.

    Raises:
        ConfigError: Prefect has found the address of another server in a file.
        DeadlineExceededError: it did not start within START_S seconds.
    """
    refuse_server_of_a_file()
    from prefect.server.api.server import SubprocessASGIServer

    server = SubprocessASGIServer()  # the one instance that Prefect's clients ask for, too
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        server.start(timeout=START_S)
    except RuntimeError as error:
        raise DeadlineExceededError(
            f"waited {START_S} s for Prefect's temporary server to start: {error}; if the machine "
            "is only busy, try again, or set PREFECT_API_URL to a server that runs"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if server.server_process is not None:
        step_back(server.server_process.pid)
        watch(server.server_process.pid)
    threading.Thread(target=_keep_alive, args=(server,), name="server-keeper", daemon=True).start()
    return server.address


def refuse_server_of_a_file() -> None:
    """Refuse an address that Prefect has from a file and not from the environment.

    Its clients would record the run there, and we would look for it in the embedded database.

    Raises:
        ConfigError: there is one; names it.
    """
    from prefect.settings import get_current_settings

    url = get_current_settings().api.url
    if url is not None:
        raise ConfigError(
            f"PREFECT_API_URL is not set, but .env, prefect.toml or pyproject.toml in {Path.cwd()} "
            f"names the Prefect server {url}: set PREFECT_API_URL={url} to use it, or take it out "
            "of the file to use the embedded one"
        )


def _keep_alive(server: Any) -> None:
    """Start the temporary server again, at its address, when it dies before this process ends.

    Until it answers, Prefect's client sends its requests again; see trainer.prefect_outage_s.
    """
    is_ending = threading.Event()
    atexit.register(is_ending.set)  # runs before the server's own handler, which was there first
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the next one inherits it
    while not is_ending.wait(LOOK_EVERY_S):
        process = server.server_process
        if process is None or process.poll() is None:
            continue
        logger.warning("Prefect's temporary server ended with code %s", process.returncode)
        server.running = False
        threading.Thread(target=_watch_next, args=(server, process), daemon=True).start()
        try:
            server.start(timeout=START_S)
        except RuntimeError as error:
            logger.warning("it did not start again: %s", error)
            continue
        logger.warning("Prefect's temporary server runs again at %s", server.address)


def _watch_next(server: Any, dead: "subprocess.Popen[bytes]") -> None:
    """Watch the process that replaces `dead`, from when it exists: this one may die meanwhile."""
    ends = time.monotonic() + STOP_S
    while server.server_process is dead and time.monotonic() < ends:
        time.sleep(0.01)
    if server.server_process is not dead:
        step_back(server.server_process.pid)
        watch(server.server_process.pid)


def step_back(pid: int) -> None:
    """Let a server do what can wait (events, logs) when the trainer leaves a core idle."""
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).nice(NICENESS)


def start_full_server(runs_root: str, port: int) -> str:
    """Start a server with UI, schedules and automations over the embedded database.

    It ends with this process, and lives on when this process executes another program.

    Returns:
        The URL of its API.

    Raises:
        DeadlineExceededError: it did not start within START_S seconds.
    """
    prefect_home(runs_root).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "prefect", "server", "start"]
    command += ["--host", LOOPBACK, "--port", str(port)]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        server = subprocess.Popen(
            command, env=ui_environment(runs_root, port), stdout=subprocess.DEVNULL
        )
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    watcher = watch(server.pid)
    assert watcher.stdin is not None
    os.set_inheritable(watcher.stdin.fileno(), True)
    url = f"http://{LOOPBACK}:{port}/api"
    _wait_until_it_answers(url, server)
    return url


def _wait_until_it_answers(url: str, server: "subprocess.Popen[bytes]") -> None:
    ends = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=STOP_S):
                return
        except OSError as error:
            if time.monotonic() >= ends or server.poll() is not None:
                raise DeadlineExceededError(
                    f"Prefect's server did not start at {url} within {START_S} s: {error}; is the "
                    "port taken? choose another with --port"
                ) from error
        time.sleep(0.5)


def watch(pid: int) -> "subprocess.Popen[bytes]":
    """End process `pid` when this process is gone; return the process that sees to it."""
    watcher = subprocess.Popen(
        [sys.executable, "-m", "flows.command.embedded_server", str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is for the driver
    )
    _watchers.append(watcher)
    return watcher


def main(pid: int) -> None:
    """Wait for the end of the driver, then end the server if it still runs."""
    try:
        server = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    sys.stdin.buffer.read()
    try:
        server.terminate()  # psutil knows a reused pid by its start time, and raises then
        server.wait(STOP_S)
    except psutil.TimeoutExpired:
        server.kill()
    except psutil.NoSuchProcess:
        return


if __name__ == "__main__":
    main(int(sys.argv[1]))
