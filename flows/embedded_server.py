"""Ends Prefect's temporary server when the process that started it is killed.

Prefect stops its server when the interpreter exits, which a SIGKILL does not let it do; the server
would then live on over the database that the next attempt opens. A watcher of a few megabytes holds
a pipe to the driver: at its end it terminates the server whose environment names that driver.
"""

import os
import secrets
import subprocess
import sys

import psutil

MARK = "ROLLFLOW_EMBEDDED_SERVER_OF"
SERVER = "prefect.server.api.server:create_app"
STOP_S = 10.0

_watchers: list[subprocess.Popen[bytes]] = []
"""Kept, since a Popen that is collected closes the pipe."""


def watch_embedded_server() -> None:
    """Mark the servers that this process will start, and start the watcher that ends them."""
    token = f"{os.getpid()}-{secrets.token_hex(8)}"
    os.environ[MARK] = token
    # A session of its own: Ctrl-C in the terminal is for the driver.
    watcher = subprocess.Popen(
        [sys.executable, "-m", "flows.embedded_server", token],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    _watchers.append(watcher)


def find_servers(token: str) -> list[psutil.Process]:
    """Return the temporary servers whose environment carries `token`."""
    found = []
    for process in psutil.process_iter():
        try:
            if SERVER in process.cmdline() and process.environ().get(MARK) == token:
                found.append(process)
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue  # another user's, or just gone
    return found


def main(token: str) -> None:
    """Wait for the end of the driver, then end its servers."""
    sys.stdin.buffer.read()
    servers = find_servers(token)
    for server in servers:
        server.terminate()
    for server in psutil.wait_procs(servers, timeout=STOP_S)[1]:
        server.kill()


if __name__ == "__main__":
    main(sys.argv[1])
