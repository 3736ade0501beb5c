"""The sending process of `kimi_ckpt_engine`: brings replicas and servers together.

| waits | for | deadline |
|---|---|---|
| `open` | nobody | |
| a thread per replica | the replica's call, its server's answers | none of its own: `close` has |
| `close` | all these threads | the caller's |
"""

import multiprocessing
import os
import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from multiprocessing.process import BaseProcess
from typing import Any
from uuid import uuid4

from rlcore.checkpoint_engine.base import TransferSettings
from rlcore.checkpoint_engine.sender import START_S
from rlcore.errors import WeightTransferError
from rlcore.types import WeightMeta

MEM_FRACTION = 0.9


@dataclass(kw_only=True, slots=True)
class _Server:
    """A process with a ParameterServer on one GPU."""

    process: BaseProcess
    requests: Connection
    sizes: tuple[int, int]
    """Of the segment and of its buckets: the package's pinned memory fits one shape only."""


@dataclass(kw_only=True, slots=True)
class _Push:
    """What is being offered, and to whom."""

    meta: WeightMeta
    settings: TransferSettings
    name_of: dict[str, str]
    """Replica by ticket."""
    open_tickets: set[str]
    """Of replicas that were not served to the end."""
    errors: dict[str, str] = field(default_factory=dict[str, str])
    places: dict[str, str] = field(default_factory=dict[str, str])
    """Replica by GPU."""
    is_over: threading.Event = field(default_factory=threading.Event)


class KimiSender:
    """Holds a server per GPU; runs in the child. See `WeightSender`."""

    server_module = "rlcore.checkpoint_engine.kimi_server"

    def __init__(self) -> None:
        # Forked from a process that has imported the package and has no threads: a server is there
        # at once. CUDA is used in the forks only.
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload([self.server_module])
        warm = self._processes.Process(target=os.getpid)
        warm.start()
        warm.join(START_S)
        self._servers: dict[str, _Server] = {}
        self._lock = threading.Lock()
        self._push: _Push | None = None
        self._authkey = os.urandom(16)
        # An abstract socket of Linux: no file is left behind.
        self._address = f"\0rollflow-weights-{uuid4().hex}"
        self._listener = Listener(self._address, authkey=self._authkey)
        threading.Thread(target=self._accept, daemon=True).start()

    def open(
        self, meta: WeightMeta, replicas: list[str], settings: TransferSettings
    ) -> dict[str, dict[str, Any]]:
        """Be ready for the replicas; return what each needs to call."""
        tickets = {uuid4().hex: name for name in replicas}
        self._push = _Push(
            meta=meta,
            settings=settings,
            name_of=tickets,
            open_tickets=set(tickets if meta.num_bytes else ()),
        )
        if not meta.num_bytes:
            self._push.is_over.set()
        shared = {"address": self._address, "authkey": self._authkey.hex()}
        return {name: {**shared, "ticket": ticket} for ticket, name in tickets.items()}

    def close(self, deadline_s: float) -> None:
        """Wait until all is sent.

        Raises:
            WeightTransferError: it is not, after `deadline_s`, or a server failed.
        """
        push = self._push
        assert push is not None
        if not push.is_over.wait(deadline_s):
            late = [push.name_of[ticket] for ticket in push.open_tickets]
            raise WeightTransferError(
                f"not all is sent after {deadline_s:g} s to {', '.join(sorted(late))}"
            )
        if push.errors:
            raise WeightTransferError("; ".join(f"{n}: {e}" for n, e in push.errors.items()))

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError, multiprocessing.AuthenticationError):
                continue  # a replica that died while it called, or somebody else
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, replica: Connection) -> None:
        """Let a server serve a replica that has called; the connection lasts as long."""
        push = self._push
        with replica:
            try:
                ticket, place = replica.recv()
            except (OSError, EOFError):
                return  # it died; whoever asked it to load knows
            if push is None or ticket not in push.name_of:
                return  # of an earlier push
            name = push.name_of[ticket]
            try:
                self._bring_together(push, name, place, replica)
            except (OSError, EOFError, WeightTransferError) as error:
                push.errors[name] = str(error) or "the server or the replica died"
            finally:
                push.open_tickets.discard(ticket)
                if not push.open_tickets:
                    push.is_over.set()

    def _bring_together(self, push: _Push, name: str, place: str, replica: Connection) -> None:
        with self._lock:
            other = push.places.setdefault(place, name)
            if other != name:
                raise WeightTransferError(
                    f"it is on {place} as {other} is, and checkpoint-engine needs a GPU each"
                )
            server = self._server(place, push)
        settings = push.settings
        server.requests.send((push.meta, settings.bucket_bytes, settings.bucket_deadline_s))
        while True:
            what, value = server.requests.recv()
            if what == "end":
                if value is not None:
                    raise WeightTransferError(value)
                return
            replica.send(value)

    def _server(self, place: str, push: _Push) -> _Server:
        sizes = (push.meta.num_bytes, push.settings.bucket_bytes)
        server = self._servers.get(place)
        if server is not None and (server.sizes != sizes or not server.process.is_alive()):
            server.process.kill()
            server.process.join()
            server = None
        if server is None:
            ours, theirs = self._processes.Pipe()
            mem_fraction = push.settings.options.get("mem_fraction", MEM_FRACTION)
            process = self._processes.Process(
                target=_serve,
                args=(self.server_module, theirs, place, os.getpid(), mem_fraction),
                daemon=True,
            )
            process.start()
            theirs.close()
            server = _Server(process=process, requests=ours, sizes=sizes)
            self._servers[place] = server
        return server


def _serve(module: str, *arguments: Any) -> None:
    """Become a server. In its process alone is the package imported."""
    import importlib

    importlib.import_module(module).serve(*arguments)
