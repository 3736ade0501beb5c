"""The servers of a Mooncake store: a master, and a process that holds the rows.

A row that a client puts into its own segment dies with the client, so clients of ours bring none:
one holder per queue owns the memory. It is a process of its own that ends with whoever started it
(its standard input closes), and it watches over the master, if that is ours. Servers and clients
find each other without a metadata server. Whoever reaches the ports can read and write rows:
loopback by default, else private networks only.
"""

import importlib
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlcore.config.queue import MooncakeStoreConfig
from rlcore.errors import ActorUnavailableError, ConfigError, DeadlineExceededError

logger = logging.getLogger(__name__)

HANDSHAKE = "P2PHANDSHAKE"
"""What Mooncake takes instead of the address of a metadata server."""
BUFFER_BYTES = 16 * 1024**2
"""For transfers of the holder itself, which makes none."""
START_S = 20.0
MASTER_S = 10.0
"""Until a master answers on its port."""
WATCH_S = 0.5
END_S = 5.0
MAX_RESTARTS = 3


class MooncakeServers:
    """Owns the holder's process.

    Example:
        >>> servers = MooncakeServers(settings)
        >>> master, metadata = servers.start()
        >>> servers.stop()
    """

    def __init__(self, settings: MooncakeStoreConfig) -> None:
        self._settings = settings
        self._holder: subprocess.Popen[str] | None = None

    def start(self) -> tuple[str, str]:
        """Start the holder; return the addresses of the master and the metadata server.

        Raises:
            ConfigError: the package is not there, or the addresses cannot be used.
            DeadlineExceededError: it does not start in time.
        """
        holder = subprocess.Popen(
            [sys.executable, "-m", "rlcore.buffer.mooncake_store"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A Ctrl-C of the terminal is for the driver, which ends everything in order.
            start_new_session=True,
        )
        self._holder = holder
        assert holder.stdin is not None and holder.stdout is not None
        holder.stdin.write(self._settings.model_dump_json() + "\n")
        holder.stdin.flush()
        answer: list[str] = []
        reader = threading.Thread(target=lambda: answer.append(_first_answer(holder)), daemon=True)
        reader.start()
        reader.join(START_S)
        if not answer:
            self.stop()
            raise DeadlineExceededError(
                f"process {os.getpid()} waited {START_S:g} s for the holder of the Mooncake store "
                f"(pid {holder.pid}) to start, master {self._settings.master_server_address}"
            )
        said = json.loads(answer[0] or '{"error": "it died without a word"}')
        if "error" in said:
            self.stop()
            raise ConfigError(f"transfer_queue.backend.MooncakeStore: {said['error']}")
        return said["master"], said["metadata"]

    def check(self) -> None:
        """Look whether the holder lives.

        Raises:
            ActorUnavailableError: it died, and the rows with it.
        """
        if self._holder is None or self._holder.poll() is not None:
            code = None if self._holder is None else self._holder.returncode
            raise ActorUnavailableError(f"the holder of the Mooncake store died (exit code {code})")

    def stop(self) -> None:
        """End the holder and its master; a repeat does nothing."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        assert holder.stdin is not None and holder.stdout is not None
        with suppress(BrokenPipeError):
            holder.stdin.close()
        try:
            holder.wait(END_S)
        except subprocess.TimeoutExpired:
            logger.warning("the holder of the Mooncake store (pid %d) is killed", holder.pid)
            holder.kill()
            holder.wait()
        holder.stdout.close()


class _Master:
    """A master of our own, started anew when it dies."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._host = socket.gethostbyname(host)
        try:
            self._port = _free_port(self._host, int(port))
        except OSError as error:
            raise ConfigError(
                f"master_server_address={address}: no mooncake_master can listen there ({error}); "
                "port 0 takes a free one, auto_init=false joins one that runs"
            ) from error
        self.address = f"{self._host}:{self._port}"
        self._num_restarts = 0
        self._process = self._start()

    def watch(self) -> None:
        """Start it again if it died: its keys are gone, its clients come back by themselves.

        Raises:
            ActorUnavailableError: it has died too often.
        """
        if self._process.poll() is None:
            return
        self._num_restarts += 1
        code = self._process.returncode
        if self._num_restarts > MAX_RESTARTS:
            raise ActorUnavailableError(f"mooncake_master died {self._num_restarts} times ({code})")
        print(f"mooncake_master ended with {code} and is started anew", file=sys.stderr)
        self._process = self._start()

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(
            [
                str(_package_folder() / "mooncake_master"),
                f"-rpc_address={self._host}",
                f"-rpc_port={self._port}",
                f"-metrics_host={self._host}",
                f"-metrics_port={_free_port(self._host)}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=_die_with_parent,
        )
        deadline = time.monotonic() + MASTER_S
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError), socket.create_connection((self._host, self._port), 1.0):
                return process
            time.sleep(0.05)
        process.kill()
        raise ConfigError(
            f"master_server_address={self.address}: mooncake_master does not listen there (exit "
            f"code {process.wait()})"
        )


def hold(settings: MooncakeStoreConfig) -> None:
    """Hold the rows until standard input closes; the first line printed says where.

    Raises:
        ActorUnavailableError: the master died too often.
    """
    master: _Master | None = None
    store: Any = None
    try:
        try:
            if settings.auto_init:
                master = _Master(settings.master_server_address)
            address = (
                _listening(settings.master_server_address) if master is None else master.address
            )
            metadata = settings.metadata_server if master is None else HANDSHAKE
            store = _mounted(settings, address, metadata)
        except (ConfigError, OSError, ValueError, ImportError) as error:
            print(json.dumps({"error": str(error)}), flush=True)
            return
        print(json.dumps({"master": address, "metadata": metadata}), flush=True)
        # Nobody reads on: what Mooncake prints from now on would fill the pipe, and then hang.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        closed = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.read(), closed.set()), daemon=True).start()
        while not closed.wait(WATCH_S):
            if master is not None:
                master.watch()
    finally:
        if master is not None:
            master.stop()  # and with it all that it would have to be told
        elif store is not None:
            store.close()


def _listening(address: str) -> str:
    """Return the address if something is there: the library itself would wait without an end."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), MASTER_S):
            return address
    except OSError as error:
        raise ConfigError(
            f"master_server_address={address}: nothing listens there ({error}); start a "
            "mooncake_master, or set auto_init=true"
        ) from error


def _mounted(settings: MooncakeStoreConfig, address: str, metadata: str) -> Any:
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    code = store.setup(
        settings.local_hostname,
        metadata,
        settings.global_segment_size,
        BUFFER_BYTES,
        settings.protocol,
        settings.device_name,
        address,
    )
    if code != 0:
        raise ConfigError(
            f"master_server_address={address}: a store of {settings.global_segment_size} bytes "
            f"cannot be set up there (code {code}); is a mooncake_master running, or is "
            "auto_init=true meant?"
        )
    return store


def _package_folder() -> Path:
    spec = importlib.util.find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "the package mooncake is not installed; install mooncake-transfer-engine (without "
            "CUDA: mooncake-transfer-engine-non-cuda) and the system's libibverbs1"
        )
    return Path(spec.submodule_search_locations[0])


def _first_answer(holder: "subprocess.Popen[str]") -> str:
    assert holder.stdout is not None
    for line in holder.stdout:
        if line.startswith("{"):  # what Mooncake itself prints comes between
            return line
    return ""


def _free_port(host: str, port: int = 0) -> int:
    """Return `port` if nothing listens there, for 0 a free one; OSError otherwise."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        return probe.getsockname()[1]


def _die_with_parent() -> None:
    """Let the kernel end this process when its parent is killed (Linux)."""
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


if __name__ == "__main__":
    hold(MooncakeStoreConfig.model_validate_json(sys.stdin.readline()))
    sys.stdout.flush()
    os._exit(0)  # the library's threads would wait for a master that is gone
