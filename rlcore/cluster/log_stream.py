"""Log records of other processes, streamed to the driver: one socket per process.

Why sockets and not Ray calls: a record is in the kernel before `emit` returns, so the last lines of
a process that is killed the next moment still arrive; and the kernel closes the socket when the
process dies, so the end of a stream proves the death, on this host or another. Records travel as
JSON lines; a stream begins with a token that only the actors of this run know.

    LogServer (driver)   waits for: nothing; one daemon thread per stream
    StreamHandler        waits for: the kernel's buffer, SEND_TIMEOUT_S at most; then it drops
"""

import json
import logging
import os
import secrets
import socket
import socketserver
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 2.0
MAX_MESSAGE_CHARS = 16_384
MAX_LINE_BYTES = 1 << 20
TAIL_LINES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LogAddress:
    """Where a process sends its records; handed to actors when they are created."""

    host: str
    port: int
    token: str
    """Known to the actors of this run only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRecord:
    """One log record of another process."""

    source: str
    """Name of the process, e.g. `executor-0.1` or `trainer-rank-0`."""
    call_id: str
    """The executor call during which it was written; empty elsewhere."""
    name: str
    """Logger."""
    level: int
    created: float
    """Seconds since the epoch, by the sender's clock."""
    message: str
    """With the traceback, if the record had one."""


RecordSink = Callable[[StreamRecord], None]


@dataclass(kw_only=True, slots=True)
class CallLog:
    """What one executor call has logged so far."""

    sink: RecordSink | None
    tail: deque[str] = field(default_factory=lambda: deque[str](maxlen=TAIL_LINES))
    """The last lines, for the message about a killed executor."""

    def write(self, record: StreamRecord) -> None:
        """Keep the record's line and pass the record on."""
        self.tail.append(f"{logging.getLevelName(record.level)} {record.name}: {record.message}")
        if self.sink is not None:
            self.sink(record)


class StreamHandler(logging.Handler):
    """Sends each record of this process to the driver before `emit` returns.

    A driver that does not read costs one SEND_TIMEOUT_S; from then on records are dropped. The
    socket stays open even then, since its end means that this process is dead.

    Raises:
        OSError: the driver cannot be reached.
    """

    def __init__(self, address: LogAddress, source: str) -> None:
        super().__init__()
        self.call_id = ""
        """Set by the executor for the time of a call."""
        self._is_broken = False
        self._has_records = False
        self._socket = socket.create_connection(
            (address.host, address.port), timeout=CONNECT_TIMEOUT_S
        )
        self._socket.settimeout(SEND_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A forked child would keep the stream open after this process is dead.
        os.register_at_fork(after_in_child=self._leave)
        self._send({"token": address.token, "source": source})

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record."""
        self._has_records = self._has_records or bool(self.call_id)
        message = self.format(record)
        if len(message) > MAX_MESSAGE_CHARS:
            message = f"{message[:MAX_MESSAGE_CHARS]}... [{len(message)} characters]"
        self._send(
            {
                "call_id": self.call_id,
                "name": record.name,
                "level": record.levelno,
                "created": record.created,
                "message": message,
            }
        )

    def end_call(self) -> bool:
        """Tell the driver that the call has no more records; return whether it had any."""
        self.acquire()
        try:
            had_records, self._has_records = self._has_records, False
            if had_records:
                self._send({"call_id": self.call_id, "end": True})
            self.call_id = ""
        finally:
            self.release()
        return had_records

    def _send(self, entry: dict[str, Any]) -> None:
        if self._is_broken:
            return
        try:
            self._socket.sendall(json.dumps(entry).encode() + b"\n")
        except OSError:  # the driver is gone or stuck: logging must not stop the work
            self._is_broken = True

    def _leave(self) -> None:
        self._is_broken = True
        self._socket.close()


def connect_log_stream(
    address: LogAddress, source: str, level: int = logging.INFO
) -> StreamHandler:
    """Send this process's records of `level` and above to the driver; return the handler."""
    handler = StreamHandler(address, source)
    attach(handler, level)
    return handler


def attach(handler: StreamHandler, level: int = logging.INFO) -> None:
    """Put the handler on the root logger, again if a library has reset logging meanwhile."""
    root = logging.getLogger()
    handler.setLevel(level)
    if handler not in root.handlers:
        root.addHandler(handler)
    if root.level > level or root.level == logging.NOTSET:
        root.setLevel(level)


class _Stream(socketserver.StreamRequestHandler):
    """One connected process; runs in a thread of its own."""

    def handle(self) -> None:
        """Read lines until the process is dead."""
        assert isinstance(self.server, _Server), "only _Server makes streams"
        owner = self.server.owner
        hello = self._read()
        token = str(hello.get("token", "")) if hello else ""
        if hello is None or not secrets.compare_digest(token, owner.address.token):
            logger.warning("refused a log stream from %s: wrong token", self.client_address)
            return
        source = str(hello["source"])
        try:
            while (entry := self._read()) is not None:
                owner.receive(source, entry)
        finally:
            owner.gone(source).set()

    def _read(self) -> dict[str, Any] | None:
        """Return the next entry; None at the end of the stream only, which means a death."""
        try:
            line = self.rfile.readline(MAX_LINE_BYTES)
        except OSError:  # reset: the process was killed
            return None
        if not line:
            return None
        try:
            entry = json.loads(line)
        except ValueError:  # torn by the death of its writer, or not one of ours
            return {}
        return entry if isinstance(entry, dict) else {}


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128
    owner: "LogServer"


class LogServer:
    """The driver's end of all log streams.

    Args:
        host: interface to listen on; loopback unless actors run on other hosts.
        on_stray: gets the records that belong to no open call (workers, replicas).
    """

    def __init__(self, host: str = "127.0.0.1", on_stray: RecordSink | None = None) -> None:
        self.on_stray = on_stray
        self._calls: dict[str, CallLog] = {}
        self._gone: dict[str, threading.Event] = {}
        self._lock = threading.Lock()
        self._server = _Server((host, 0), _Stream)
        self._server.owner = self
        self.address = LogAddress(
            host=host, port=self._server.server_address[1], token=secrets.token_hex(16)
        )
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="log-server", daemon=True
        )
        self._thread.start()

    def open_call(self, call_id: str, sink: RecordSink | None) -> CallLog:
        """Route the records of one executor call to `sink`, from the streams' threads.

        The route lasts until the executor says that there are no more, or `close_call`.
        """
        log = CallLog(sink=sink)
        with self._lock:
            self._calls[call_id] = log
        return log

    def close_call(self, call_id: str) -> None:
        """Stop routing a call; records that come later are strays."""
        with self._lock:
            self._calls.pop(call_id, None)

    def gone(self, source: str) -> threading.Event:
        """Return the event that is set when the process named `source` is dead."""
        with self._lock:
            return self._gone.setdefault(source, threading.Event())

    def receive(self, source: str, entry: dict[str, Any]) -> None:
        """Route one entry of a stream; called from that stream's thread."""
        if "call_id" not in entry:
            return
        with self._lock:
            call = self._calls.get(entry["call_id"])
        if entry.get("end"):
            self.close_call(entry["call_id"])
            return
        record = StreamRecord(
            source=source,
            call_id=entry["call_id"],
            name=entry["name"],
            level=entry["level"],
            created=entry["created"],
            message=entry["message"],
        )
        sink = call.write if call is not None else self.on_stray
        if sink is not None:
            try:
                sink(record)
            except Exception:  # the end of the stream would pass for a death
                logger.warning("a log record of %s was lost", source, exc_info=True)

    def close(self) -> None:
        """Stop listening; streams that are open end with their processes."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
