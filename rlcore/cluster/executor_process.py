"""The process that runs phases' bodies: `Executor`, and what a body may ask about itself.

A body runs alone in its executor, on the main thread, to its end; an async body gets an event loop
of its own. Whatever it raises travels back with its traceback. The pool: `executor.py`.
"""

import asyncio
import inspect
import os
import pickle
import socket
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle

from rlcore.cluster.log_stream import LogAddress, StreamHandler, attach, connect_log_stream
from rlcore.errors import BodyError, PayloadTooLargeError
from rlcore.types import CallKey

MAX_PAYLOAD_BYTES = 1 << 20
"""Parameters and results are small: tensors stay in the queue, a phase gets a reference."""
MAX_ERROR_CHARS = 8_192
"""Of a traceback or message that travels with an error."""


@dataclass(kw_only=True, slots=True)
class _Process:
    """What this process knows about itself; filled in an executor only."""

    source: str = ""
    key: CallKey | None = None


_process = _Process()


def is_executor_process() -> bool:
    """Say whether this process is an executor, i.e. runs phases' bodies."""
    return bool(_process.source)


def require_executor(what: str) -> None:
    """Refuse to run a phase's body elsewhere: a direct call `phase(...)` bypasses the runner.

    Raises:
        RuntimeError: this process is not an executor.
    """
    if not is_executor_process():
        raise RuntimeError(
            f"{what} runs in an executor only: call it as `.submit(...)` in a flow whose task "
            "runner is a PhaseRunner; a direct call would run it in this process"
        )


def current_key() -> CallKey:
    """Return the key of the running body, which every call to a collaborator carries.

    Raises:
        RuntimeError: no body runs in this process.
    """
    if _process.key is None:
        raise RuntimeError("no phase's body runs in this process, so there is no call key")
    return _process.key


class RemoteTracebackError(Exception):
    """Cause of an error from an executor: its text is the traceback there."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorInfo:
    """Where an executor lives."""

    source: str
    pid: int
    hostname: str
    node_id: str
    """Ray's name of the host."""
    stderr_path: str
    """File that holds its standard error, on its host; empty if it has none."""

    def __str__(self) -> str:
        return f"{self.source} (pid {self.pid} on {self.hostname})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a body ended: a pickled result or error."""

    result: bytes = b""
    error: bytes = b""
    """The pickled exception; empty when it cannot travel or there is none."""
    summary: str = ""
    """Type and message of the error; empty when there is none."""
    traceback: str = ""
    has_records: bool = False
    """Whether log records of the call are on their way."""

    def unwrap(self) -> Any:
        """Return the body's result.

        Raises:
            BodyError: the body raised something that cannot be rebuilt here.
            BaseException: what the body raised, its traceback there as cause.
        """
        if not self.summary:
            return cloudpickle.loads(self.result)
        raise self._rebuild() from RemoteTracebackError(self.traceback)

    def _rebuild(self) -> BaseException:
        try:
            error = cloudpickle.loads(self.error) if self.error else None
        except Exception as exc:  # noqa: BLE001 - unpickling foreign classes raises anything
            return BodyError(f"{self.summary} (cannot be rebuilt here: {exc!r})")
        return error if isinstance(error, Exception) else BodyError(self.summary)


def dump_call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    limit: int = MAX_PAYLOAD_BYTES,
) -> bytes:
    """Pickle a call.

    Raises:
        PayloadTooLargeError: it takes more than `limit` bytes; names its largest parameters.
        TypeError: it cannot be pickled.
    """
    name = getattr(fn, "__name__", repr(fn))
    try:
        payload = _dumps((fn, tuple(args), dict(kwargs)))
    except (TypeError, pickle.PicklingError) as exc:
        raise TypeError(f"the parameters of {name!r} cannot be sent to an executor: {exc}") from exc
    if len(payload) > limit:
        parts = {**{f"argument {i}": a for i, a in enumerate(args)}, **kwargs}
        sizes = {part: len(_dumps(value)) for part, value in parts.items()}
        largest = sorted(sizes, key=lambda part: -sizes[part])[:3]
        raise PayloadTooLargeError(
            f"the parameters of {name!r} take {_mib(len(payload))}, the limit is {_mib(limit)}; "
            "largest: "
            + ", ".join(f"{part} {_mib(sizes[part])}" for part in largest)
            + "; pass a reference and keep the data in the queue"
        )
    return payload


class Executor:
    """Runs one body at a time in this process."""

    def __init__(self, source: str, log_address: LogAddress) -> None:
        self._source = source
        self._log: StreamHandler = connect_log_stream(log_address, source)
        _process.source = source

    def start(self, user_modules: Sequence[str]) -> ExecutorInfo:
        """Load the user's modules, so that their classes unpickle here, and say who this is."""
        if user_modules:
            from rlcore.user_code import load_user_module

            for path in user_modules:
                load_user_module(path)
        stderr = Path("/proc/self/fd/2")
        target = os.readlink(stderr) if stderr.is_symlink() else ""
        return ExecutorInfo(
            source=self._source,
            pid=os.getpid(),
            hostname=socket.gethostname(),
            node_id=ray.get_runtime_context().get_node_id(),
            stderr_path=target if Path(target).is_file() else "",
        )

    def run(self, payload: bytes, call_id: str, key: CallKey, limit: int) -> Outcome:
        """Run the pickled call to its end; never raises."""
        self._log.call_id = call_id
        _process.key = key
        try:
            fn, args, kwargs = cloudpickle.loads(payload)
            attach(self._log)  # unpickling may have imported a library that resets logging
            result = fn(*args, **kwargs)
            if inspect.isawaitable(result):
                result = asyncio.run(_finish(result))
            outcome = Outcome(result=_dump_result(result, fn, limit))
        except BaseException as exc:  # noqa: BLE001 - a body may raise anything; it is reported
            outcome = _failed(exc)
        _process.key = None
        return replace(outcome, has_records=self._log.end_call())


async def _finish(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _dump_result(result: Any, fn: Callable[..., Any], limit: int) -> bytes:
    dumped = _dumps(result)
    if len(dumped) > limit:
        raise PayloadTooLargeError(
            f"the result of {getattr(fn, '__name__', fn)!r} ({type(result).__name__}) takes "
            f"{_mib(len(dumped))}, the limit is {_mib(limit)}; put the data into the queue and "
            "return a reference"
        )
    return dumped


def _failed(exc: BaseException) -> Outcome:
    text = "".join(traceback.format_exception(exc))
    summary = f"{type(exc).__name__}: {exc}"[:MAX_ERROR_CHARS]
    try:
        dumped = _dumps(exc)
        pickle.loads(dumped)  # a constructor with several arguments may pickle and not unpickle
    except Exception:  # noqa: BLE001 - pickling foreign objects raises anything
        dumped = b""
    return Outcome(
        error=dumped if len(dumped) <= MAX_PAYLOAD_BYTES else b"",
        summary=summary,
        traceback=text[-MAX_ERROR_CHARS:],
    )


def _dumps(value: Any) -> bytes:
    return cloudpickle.dumps(value)  # pyright: ignore[reportPrivateImportUsage]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.2f} MiB"


ExecutorActor = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(Executor)
"""The Ray shell. Never restarted or retried by Ray: Prefect retries, after the pool replaced it."""
