"""The process that moves bytes between devices or hosts: a child of whoever calls `push`.

It maps the trainer's segment and sends it; the trainer has nothing to do with it, so that a
transfer that hangs costs neither the optimizer nor the caller: the child is killed and the next
push starts another. It lives on after a good push, and ends with its parent.

| waits | for | deadline |
|---|---|---|
| caller | the child to be up | `START_S` |
| caller | the child to say where receivers find it | `OPEN_S` |
| caller | the child to say that all is sent | a bucket's twice, or that and `OPEN_S` |
"""

import dataclasses
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from rlcore.checkpoint_engine.base import (
    Acknowledgement,
    Outcome,
    Replica,
    TransferSettings,
    load_each,
)
from rlcore.errors import WeightTransferError
from rlcore.types import CallKey, WeightMeta

START_S = 120.0
"""Its libraries take seconds to import, more on a busy machine."""
OPEN_S = 30.0
"""For what the child answers at once, unless it hangs."""


class WeightSender(Protocol):
    """The sending half of a transport, inside the child. One object for all pushes."""

    def open(
        self, meta: WeightMeta, replicas: list[str], settings: TransferSettings
    ) -> dict[str, dict[str, Any]]:
        """Begin to offer `meta`; return by replica what its receiver needs to know."""
        ...

    def close(self, deadline_s: float) -> None:
        """End the push: everybody has everything.

        Raises:
            WeightTransferError: something is still on its way after `deadline_s`.
        """
        ...


class SenderProcess:
    """Handle of one child; used by one thread at a time.

    Example:
        >>> sender = SenderProcess("gloo")
        >>> transports = sender.open(meta, ["replica-0"], TransferSettings())
        >>> sender.close(60.0)
    """

    def __init__(self, backend: str, start_s: float = START_S, sender: str = "") -> None:
        """Start the child.

        Args:
            backend: Whose.
            start_s: For the child to be up.
            sender: `module:Class` of the `WeightSender`; empty: the one that ships.

        Raises:
            WeightTransferError: it did not start.
        """
        self.backend = backend
        program = "rlcore.checkpoint_engine.sender_process"
        command = [sys.executable, "-m", program, sender or backend]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pid = self._child.pid
        try:
            self._answer(start_s, "start")
        except BaseException:
            self.kill()  # nobody else knows of it
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the child runs."""
        return self._child.poll() is None

    def open(
        self, meta: WeightMeta, replicas: list[str], settings: TransferSettings
    ) -> dict[str, dict[str, Any]]:
        """Begin to offer `meta`; return by replica what its receiver needs to know.

        Raises:
            WeightTransferError: the child failed, died or does not answer.
        """
        request = {
            "meta": dataclasses.asdict(meta),
            "replicas": replicas,
            "settings": dataclasses.asdict(settings),
        }
        return self._call({"open": request}, OPEN_S, "open")

    def close(self, deadline_s: float) -> None:
        """End the push.

        Raises:
            WeightTransferError: the child failed, died or does not answer.
        """
        self._call({"close": deadline_s}, deadline_s + min(OPEN_S, deadline_s), "close")

    def kill(self) -> None:
        """End the child, also a stopped one, and wait for its death."""
        self._child.kill()
        self._child.wait(OPEN_S)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()

    def _call(self, request: dict[str, Any], deadline_s: float, what: str) -> Any:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(request).encode() + b"\n")
            self._child.stdin.flush()
        except OSError:
            raise WeightTransferError(self._message(what, "is dead")) from None
        return self._answer(deadline_s, what)

    def _answer(self, deadline_s: float, what: str) -> Any:
        answer = json.loads(self._read_line(deadline_s, what))
        if "error" in answer:
            raise WeightTransferError(self._message(what, f"failed: {answer['error']}"))
        return answer["result"]

    def _read_line(self, deadline_s: float, what: str) -> bytes:
        assert self._child.stdout is not None
        descriptor, line = self._child.stdout.fileno(), b""
        ends = time.monotonic() + deadline_s
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, ends - time.monotonic())):
                    message = f"did not answer within {deadline_s:g} s"
                    raise WeightTransferError(self._message(what, message))
                piece = os.read(descriptor, 1 << 16)
                if not piece:
                    raise WeightTransferError(self._message(what, "is dead"))
                line += piece
        return line

    def _message(self, what: str, how: str) -> str:
        return f"the process that sends weights by {self.backend} (pid {self.pid}) {how} ({what})"


_senders: dict[str, SenderProcess] = {}
"""The living child of each backend: starting one takes seconds, and a process pushes often."""
_lock = threading.Lock()


def push_through_child(
    backend: str,
    settings: TransferSettings,
    key: CallKey,
    meta: WeightMeta,
    replicas: Mapping[str, Replica],
    sender_class: str = "",
) -> dict[str, Outcome]:
    """Load `meta` in every replica from this process's child; return by name how it went.

    Unless everything went well the child is killed: what state its connections are in, nobody
    knows.

    Args:
        backend: Whose child.
        settings: Of the backend.
        key: Of the caller.
        meta: What was published.
        replicas: By name.
        sender_class: `module:Class` of the `WeightSender`; empty: the one that ships.

    Raises:
        WeightTransferError: the child failed, died or does not answer.
    """
    with _lock:
        is_good = False
        sender = _sender(backend, sender_class)
        try:
            transports = sender.open(meta, list(replicas), settings)
            shared = settings.transport(backend, sender_pid=sender.pid)
            metas = {n: replace(meta, transport=shared | transports[n]) for n in replicas}
            outcomes = load_each(key, metas, replicas)
            if all(isinstance(outcome, Acknowledgement) for outcome in outcomes.values()):
                sender.close(settings.bucket_deadline_s)
                is_good = True
        finally:
            if not is_good:
                del _senders[backend]
                sender.kill()
        return outcomes


def _sender(backend: str, sender_class: str) -> SenderProcess:
    sender = _senders.get(backend)
    if sender is None or not sender.is_alive:
        sender = _senders[backend] = SenderProcess(backend, sender=sender_class)
    return sender
