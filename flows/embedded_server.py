"""Prefect's temporary server, started by us so that it neither dies too early nor lives too long.

Too early: Ctrl-C in a terminal reaches the whole process group, and a server that ends with it
cannot take the run's last states any more; so it starts with SIGINT blocked (Prefect ends it by
SIGTERM). Too long: Prefect stops it when the interpreter exits, which a SIGKILL of the driver
skips; so a watcher holds a pipe to the driver and ends the server when the pipe breaks. Else it
would live on over the database that the next attempt opens.
"""

import signal
import subprocess
import sys

import psutil

from rlcore.errors import DeadlineExceededError

START_S = 120
STOP_S = 10.0

_watchers: list[subprocess.Popen[bytes]] = []
"""Kept, since a Popen that is collected closes the pipe."""


def start_embedded_server() -> str:
    """Start the temporary server that this process's flows will use; return its address.

    Raises:
        DeadlineExceededError: it did not start within START_S seconds.
    """
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
        watch(server.server_process.pid)
    return server.address


def watch(pid: int) -> None:
    """End process `pid` when this process is gone."""
    watcher = subprocess.Popen(
        [sys.executable, "-m", "flows.embedded_server", str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in the terminal is for the driver
    )
    _watchers.append(watcher)


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
