"""The pool of executors of a run: long-lived Ray actors in which phases' bodies run.

A body that is overdue or cancelled is fenced, its executor killed and its death awaited before the
caller hears of it, so that a retry never runs beside the old body; a new executor starts in the
background. Ray itself never retries or restarts anything here.

    run()        waits for: an idle executor (acquire_deadline_s), then the body (deadline_s)
    put down     waits for: the end of the dead process's log stream, on this host also for the
                            process to be gone (death_deadline_s)

The pool belongs to no event loop: waiting is done on concurrent futures, killing in a thread.
"""

import asyncio
import concurrent.futures
import itertools
import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError, RayTaskError

from rlcore.cluster.executor_process import (
    MAX_PAYLOAD_BYTES,
    ExecutorActor,
    ExecutorInfo,
    Outcome,
    current_key,
    dump_call,
    is_executor_process,
    require_executor,
)
from rlcore.cluster.log_stream import CallLog, LogAddress, LogServer, RecordSink, StreamRecord
from rlcore.errors import (
    DeadlineExceededError,
    ExecutorDiedError,
    FencedError,
    PhaseTimeoutError,
    RLCoreError,
)
from rlcore.types import CallKey

__all__ = [
    "MAX_PAYLOAD_BYTES",
    "ExecutorPool",
    "PoolLimits",
    "current_key",
    "is_executor_process",
    "require_executor",
]

logger = logging.getLogger(__name__)

FIRST_START_DELAY_S = 1.0
MAX_START_FAILURES = 5
STDERR_LINES = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolLimits:
    """Sizes and deadlines of a pool."""

    payload_bytes: int = MAX_PAYLOAD_BYTES
    """Of a call's parameters and of its result, pickled."""
    start_deadline_s: float = 300.0
    """For all executors to be ready."""
    acquire_deadline_s: float = 3600.0
    """For an executor to become idle."""
    death_deadline_s: float = 15.0
    """For a killed executor to be dead; a cancelled run has 25 s for everything."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Slot:
    """One place of the pool and the process that holds it now."""

    index: int
    generation: int = 0
    actor: Any = None
    info: ExecutorInfo | None = None
    """None while the process starts."""
    process: psutil.Process | None = None
    """The process, if it is on this host."""
    key: CallKey | None = None
    busy_since: float = 0.0
    num_start_failures: int = 0
    start_error: str = ""

    @property
    def source(self) -> str:
        return f"executor-{self.index}.{self.generation}"

    def __str__(self) -> str:
        if self.info is None:
            return f"{self.source} starts{f' after {self.start_error}' if self.start_error else ''}"
        if self.key is None:
            return f"{self.info} is idle"
        return f"{self.info} runs {self.key} since {time.monotonic() - self.busy_since:.1f} s"


class ExecutorPool:
    """Runs bodies in `size` executors, one at a time in each.

    Args:
        size: executors; as many bodies run at once.
        user_modules: Python files that every executor loads when it starts.
        on_stray: gets log records that belong to no running body, in a thread of the log server.
        on_fence: called in a thread with the key of a try that is given up, before its executor is
            killed, so that collaborators can refuse that try from then on.
        limits: sizes and deadlines.
    """

    def __init__(
        self,
        size: int,
        *,
        user_modules: Sequence[str] = (),
        on_stray: RecordSink | None = None,
        on_fence: Callable[[CallKey], None] | None = None,
        limits: PoolLimits | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"an executor pool needs at least one executor, not {size}")
        self.pool_id = uuid.uuid4().hex
        self.limits = limits or PoolLimits()
        self._user_modules = list(user_modules)
        self._on_fence = on_fence
        self._on_stray = on_stray
        self._slots = [_Slot(index=index) for index in range(size)]
        self._idle: deque[_Slot] = deque()
        self._waiters: deque[concurrent.futures.Future[_Slot]] = deque()
        self._attempts: dict[str, int] = {}
        self._lock = threading.RLock()
        self._log_server: LogServer | None = None
        self._reaper = concurrent.futures.ThreadPoolExecutor(size, "executor-reaper")
        self._is_closed = False
        self._call_ids = itertools.count(1)

    @property
    def log_address(self) -> LogAddress:
        """Where actors of this run send their log records (`connect_log_stream`)."""
        return self._server().address

    def set_stray_sink(self, sink: RecordSink) -> None:
        """Send the records of workers, replicas and idle executors to `sink`."""
        self._on_stray = sink
        if self._log_server is not None:
            self._log_server.on_stray = sink

    def start(self) -> None:
        """Start all executors in parallel and wait until they are ready; call it in a thread.

        Raises:
            RuntimeError: Ray is not up.
            DeadlineExceededError: an executor is not ready in time.
            Exception: what a user's module raised when it was loaded.
        """
        if not ray.is_initialized():
            raise RuntimeError("Ray is not up: call ray.init before starting an ExecutorPool")
        self._log_server = LogServer(_log_host(), self._on_stray)
        refs = [self._create(slot) for slot in self._slots]
        futures = [ref.future() for ref in refs]
        waited = concurrent.futures.wait(futures, timeout=self.limits.start_deadline_s)
        if waited.not_done:
            self.close()
            raise DeadlineExceededError(
                f"the driver waited {self.limits.start_deadline_s:.0f} s for executors to start: "
                + "; ".join(self.status())
            )
        failed = [error for future in futures if (error := future.exception()) is not None]
        if failed:
            self.close()
            raise _unwrapped(failed[0])
        for slot, future in zip(self._slots, futures, strict=True):
            self._ready(slot, future.result())

    async def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        key: CallKey,
        deadline_s: float | None = None,
        on_log: RecordSink | None = None,
    ) -> Any:
        """Run `fn(*args, **kwargs)` in an executor and return its result.

        Args:
            fn: the body, sync or async; pickled by value unless a module of that name has it.
            args: its positional parameters.
            kwargs: its named parameters.
            key: who calls; `current_key()` in the body.
            deadline_s: for the body once it runs; None for no limit.
            on_log: gets the body's log records, in a thread; the last may come a moment after the
                result, but never after the death of the process.

        Raises:
            PayloadTooLargeError: parameters or result are over the limit.
            PhaseTimeoutError: the body was overdue; its process is dead.
            ExecutorDiedError: its process died.
            FencedError: a later attempt of this run has called already.
            DeadlineExceededError: no executor became idle.
            BaseException: what the body raised, with its traceback there as cause.
        """
        self._check_attempt(key)
        payload = dump_call(fn, args, kwargs or {}, limit=self.limits.payload_bytes)
        slot = await self._acquire(key)
        call_id = str(next(self._call_ids))
        log = self._server().open_call(call_id, on_log)
        try:
            ref = slot.actor.run.remote(payload, call_id, key, self.limits.payload_bytes)
            outcome = await self._reply(ref, slot, key, deadline_s, log)
        except BaseException:
            self._server().close_call(call_id)  # its process is dead: there are no more records
            raise
        if not outcome.has_records:
            self._server().close_call(call_id)
        return outcome.unwrap()

    def close(self) -> None:
        """Kill all executors and wait until they are dead; calls that still run fail.

        Call it in a thread: it takes up to `death_deadline_s`.
        """
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
            waiters = [*self._waiters]
            self._waiters.clear()
        if was_closed:
            return
        for waiter in waiters:
            waiter.set_exception(ExecutorDiedError("the executor pool was closed"))
        jobs = [self._reaper.submit(self._kill, slot) for slot in self._slots]
        self._reaper.shutdown(wait=True)
        if self._log_server is not None:
            self._log_server.close()
        for job in jobs:
            job.result()

    def status(self) -> list[str]:
        """Return one line per executor: who it is and what it does."""
        with self._lock:
            return [str(slot) for slot in self._slots]

    def executors(self) -> list[ExecutorInfo]:
        """Return the executors that are up."""
        with self._lock:
            return [slot.info for slot in self._slots if slot.info is not None]

    # One call

    def _check_attempt(self, key: CallKey) -> None:
        with self._lock:
            highest = self._attempts.setdefault(key.run_id, key.attempt)
            self._attempts[key.run_id] = max(highest, key.attempt)
        if key.attempt < highest:
            raise FencedError(f"{key} is refused: attempt {highest} of this run has called already")

    async def _acquire(self, key: CallKey) -> _Slot:
        self._server()
        waiter: concurrent.futures.Future[_Slot] = concurrent.futures.Future()
        with self._lock:
            if self._is_closed:
                raise ExecutorDiedError(f"{key}: the executor pool was closed")
            if self._idle:
                return self._occupy(self._idle.popleft(), key)
            self._check_not_lost()
            self._waiters.append(waiter)
        timeout_s = self.limits.acquire_deadline_s
        try:
            await asyncio.wait({asyncio.wrap_future(waiter)}, timeout=timeout_s)
        except asyncio.CancelledError:
            if not self._leave(waiter) and waiter.exception() is None:
                self._release(waiter.result())
            raise
        if self._leave(waiter):
            raise DeadlineExceededError(
                f"{key} waited {timeout_s:g} s for an idle executor: " + "; ".join(self.status())
            )
        return self._occupy(waiter.result(), key)

    def _leave(self, waiter: concurrent.futures.Future[_Slot]) -> bool:
        """Stop waiting; say whether nothing had been given."""
        with self._lock:
            is_waiting = waiter in self._waiters
            if is_waiting:
                self._waiters.remove(waiter)
        return is_waiting

    def _occupy(self, slot: _Slot, key: CallKey) -> _Slot:
        slot.key = key
        slot.busy_since = time.monotonic()
        return slot

    async def _reply(
        self, ref: Any, slot: _Slot, key: CallKey, deadline_s: float | None, log: CallLog
    ) -> Outcome:
        """Wait for the body; on any end but its own, return only when its process is dead."""
        reply = asyncio.wrap_future(ref.future())
        reply.add_done_callback(_retrieve)
        try:
            done, _ = await asyncio.wait({reply}, timeout=deadline_s)
        except asyncio.CancelledError:
            await self._put_down(slot, key)
            raise
        if not done:
            who = str(slot)
            await self._put_down(slot, key)
            raise PhaseTimeoutError(
                f"phase {key.phase} is overdue: {who}, its deadline is {deadline_s:g} s; that "
                "process was killed and is dead"
            )
        try:
            outcome: Outcome = reply.result()
        except RayError as exc:
            info = slot.info
            await self._put_down(slot, key)
            _write_stderr(info, log)
            raise ExecutorDiedError(
                f"{info} died while it ran {key}: {' '.join(str(exc).split())[:600]}"
            ) from exc
        self._release(slot)
        return outcome

    # Places and processes

    def _release(self, slot: _Slot) -> None:
        with self._lock:
            slot.key = None
            while self._waiters:
                waiter = self._waiters.popleft()
                if waiter.set_running_or_notify_cancel():
                    waiter.set_result(slot)
                    return
            self._idle.append(slot)

    async def _put_down(self, slot: _Slot, key: CallKey) -> None:
        """Fence the try, kill its executor, await the death; a cancel waits for that, too."""
        if not self._is_closed:
            await _settle(self._reaper.submit(self._reap, slot, key))

    def _reap(self, slot: _Slot, key: CallKey) -> None:
        try:
            if self._on_fence is not None:
                self._on_fence(key)
        finally:
            self._kill(slot)
            self._replace(slot)

    def _kill(self, slot: _Slot) -> None:
        if slot.actor is None or not ray.is_initialized():
            return  # the processes of a cluster that is shut down die with it
        ray.kill(slot.actor, no_restart=True)
        if slot.info is not None and not self._is_dead(slot):
            slot.start_error = f"{slot.info} did not die"
            raise RLCoreError(
                f"{slot.info} did not die within {self.limits.death_deadline_s:g} s of being "
                "killed; its phase is not retried, since the old body may still run"
            )

    def _is_dead(self, slot: _Slot) -> bool:
        """Wait for the death of a killed process; say whether it came in time."""
        deadline = time.monotonic() + self.limits.death_deadline_s
        if not self._server().gone(slot.source).wait(self.limits.death_deadline_s):
            return False
        try:
            if slot.process is not None:
                slot.process.wait(max(0.1, deadline - time.monotonic()))
        except psutil.TimeoutExpired:
            return False
        return True

    def _create(self, slot: _Slot) -> Any:
        slot.actor = ExecutorActor.remote(slot.source, self._server().address)
        return slot.actor.start.remote(self._user_modules)

    def _replace(self, slot: _Slot) -> None:
        with self._lock:
            if self._is_closed:
                return
            slot.generation += 1
            slot.info, slot.process, slot.key = None, None, None
            future = self._create(slot).future()
        future.add_done_callback(lambda done: self._on_started(slot, done))

    def _on_started(self, slot: _Slot, future: concurrent.futures.Future[ExecutorInfo]) -> None:
        error = future.exception()
        if error is None:
            self._ready(slot, future.result())
            return
        with self._lock:
            slot.start_error = repr(_unwrapped(error))[:600]
            slot.num_start_failures += 1
            if self._is_closed:
                return
            if slot.num_start_failures < MAX_START_FAILURES:
                delay_s = FIRST_START_DELAY_S * 2 ** (slot.num_start_failures - 1)
                timer = threading.Timer(delay_s, self._replace, (slot,))
                timer.daemon = True
                timer.start()
                return
            waiters = [*self._waiters]
        try:
            self._check_not_lost()
        except ExecutorDiedError as exc:
            for waiter in waiters:
                waiter.set_exception(exc)

    def _check_not_lost(self) -> None:
        if all(slot.num_start_failures >= MAX_START_FAILURES for slot in self._slots):
            raise ExecutorDiedError("no executor can be started: " + "; ".join(self.status()))

    def _ready(self, slot: _Slot, info: ExecutorInfo) -> None:
        slot.info, slot.process = info, _local_process(info)
        slot.num_start_failures, slot.start_error = 0, ""
        self._release(slot)

    def _server(self) -> LogServer:
        if self._log_server is None:
            raise RuntimeError("the executor pool is not started: call start() first")
        return self._log_server


async def _settle(job: concurrent.futures.Future[None]) -> None:
    """Wait for a job, cancelled or not; raise what the job raised, then the cancel."""
    waiting = asyncio.wrap_future(job)
    cancelled: asyncio.CancelledError | None = None
    while not waiting.done():
        try:
            await asyncio.wait({waiting})
        except asyncio.CancelledError as exc:
            cancelled = exc
    waiting.result()
    if cancelled is not None:
        raise cancelled


def _log_host() -> str:
    """Return loopback where the cluster is one host, else this host's address."""
    num_hosts = sum(node["Alive"] for node in ray.nodes())
    return "127.0.0.1" if num_hosts == 1 else ray.util.get_node_ip_address()


def _is_local(info: ExecutorInfo) -> bool:
    return info.node_id == ray.get_runtime_context().get_node_id()


def _local_process(info: ExecutorInfo) -> psutil.Process | None:
    try:
        return psutil.Process(info.pid) if _is_local(info) else None
    except psutil.NoSuchProcess:  # dead already; its stream says so
        return None


def _unwrapped(error: BaseException) -> BaseException:
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, BaseException) else error


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Mark the error of a reply that nobody waits for any more as seen."""
    if not future.cancelled():
        future.exception()


def _write_stderr(info: ExecutorInfo | None, log: CallLog) -> None:
    """Add the last lines of a dead executor's standard error, where this host has the file."""
    if info is None or not info.stderr_path or not _is_local(info):
        return
    path = Path(info.stderr_path)
    text = path.read_text(errors="replace") if path.is_file() else ""
    # Ray writes marks of its own, e.g. ":actor_name:Executor".
    lines = [line for line in text.splitlines() if not line.startswith(":")][-STDERR_LINES:]
    if lines:
        log.write(
            StreamRecord(
                source=info.source,
                call_id="",
                name=f"{info.source}.stderr",
                level=logging.ERROR,
                created=time.time(),
                message="\n".join(lines),
            )
        )
