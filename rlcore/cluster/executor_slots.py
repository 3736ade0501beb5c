"""The processes behind an executor pool: started, handed out, killed, replaced.

A killed executor is dead before anybody hears of it, and a new one starts in the background. Ray
itself never retries or restarts anything here.

    acquire      waits for: an idle executor (acquire_deadline_s)
    put_down     waits for: the end of the dead process's log stream, on this host also for the
                            process to be gone (death_deadline_s)

Belongs to no event loop: waiting is done on concurrent futures, killing in a thread.
"""

import asyncio
import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import RayTaskError

from rlcore.cluster.executor_process import MAX_PAYLOAD_BYTES, ExecutorActor, ExecutorInfo
from rlcore.cluster.log_stream import LogServer, RecordSink
from rlcore.errors import DeadlineExceededError, ExecutorDiedError, RLCoreError
from rlcore.types import CallKey

FIRST_START_DELAY_S = 1.0
MAX_START_FAILURES = 5


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
class Slot:
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
    is_lost: bool = False
    """Nobody can use it any more: its process did not die, or none can be started."""

    @property
    def source(self) -> str:
        """Name of the process, in logs and messages."""
        return f"executor-{self.index}.{self.generation}"

    def __str__(self) -> str:
        if self.is_lost:
            return f"{self.info or self.source} is lost: {self.start_error}"
        if self.info is None:
            return f"{self.source} starts{f' after {self.start_error}' if self.start_error else ''}"
        if self.key is None:
            return f"{self.info} is idle"
        return f"{self.info} runs {self.key} since {time.monotonic() - self.busy_since:.1f} s"


class ExecutorSlots:
    """The places of a pool; see ExecutorPool for the parameters."""

    def __init__(
        self,
        size: int,
        *,
        user_modules: Sequence[str],
        on_fence: Callable[[CallKey], None] | None,
        limits: PoolLimits,
    ) -> None:
        self.limits = limits
        self._user_modules = list(user_modules)
        self._on_fence = on_fence
        self._on_stray: RecordSink | None = None
        self._slots = [Slot(index=index) for index in range(size)]
        self._idle: deque[Slot] = deque()
        self._waiters: deque[concurrent.futures.Future[Slot]] = deque()
        self._lock = threading.RLock()
        self._log_server: LogServer | None = None
        self._reaper = concurrent.futures.ThreadPoolExecutor(size, "executor-reaper")
        self._is_closed = False

    @property
    def log_server(self) -> LogServer:
        """The driver's end of the log streams."""
        if self._log_server is None:
            raise RuntimeError("the executor pool is not started: call start() first")
        return self._log_server

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
        self._log_server = LogServer(reachable_host(), self._on_stray)
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

    async def acquire(self, key: CallKey) -> Slot:
        """Wait for an idle executor and take it.

        Raises:
            DeadlineExceededError: none became idle; says who holds them.
            ExecutorDiedError: the pool was closed, or no executor is left.
        """
        _ = self.log_server
        waiter: concurrent.futures.Future[Slot] = concurrent.futures.Future()
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
                self.release(waiter.result())
            raise
        if self._leave(waiter):
            raise DeadlineExceededError(
                f"{key} waited {timeout_s:g} s for an idle executor: " + "; ".join(self.status())
            )
        return self._occupy(waiter.result(), key)

    def _leave(self, waiter: concurrent.futures.Future[Slot]) -> bool:
        """Stop waiting; say whether nothing had been given."""
        with self._lock:
            is_waiting = waiter in self._waiters
            if is_waiting:
                self._waiters.remove(waiter)
        return is_waiting

    def _occupy(self, slot: Slot, key: CallKey) -> Slot:
        slot.key = key
        slot.busy_since = time.monotonic()
        return slot

    def release(self, slot: Slot) -> None:
        """Give an executor to whoever waits longest, or keep it."""
        with self._lock:
            slot.key = None
            while self._waiters:
                waiter = self._waiters.popleft()
                if waiter.set_running_or_notify_cancel():
                    waiter.set_result(slot)
                    return
            self._idle.append(slot)

    async def put_down(self, slot: Slot, key: CallKey) -> None:
        """Fence the try, kill its executor, await the death; a cancel waits for that, too."""
        if not self._is_closed:
            await _settle(self._reaper.submit(self._reap, slot, key))

    def _reap(self, slot: Slot, key: CallKey) -> None:
        try:
            if self._on_fence is not None:
                self._on_fence(key)
        finally:
            self._kill_and_replace(slot)

    def _kill_and_replace(self, slot: Slot) -> None:
        is_dead = False
        try:
            self._kill(slot)
            is_dead = True
        finally:
            if not is_dead:  # its process may still run the old body: none takes its place
                slot.start_error = slot.start_error or "it could not be killed"
                self._lose(slot)
        self._replace(slot)

    def _kill(self, slot: Slot) -> None:
        if slot.actor is None or not ray.is_initialized():
            return  # the processes of a cluster that is shut down die with it
        ray.kill(slot.actor, no_restart=True)
        if slot.info is not None and not self._is_dead(slot):
            slot.start_error = "it did not die when it was killed"
            raise RLCoreError(
                f"{slot.info} did not die within {self.limits.death_deadline_s:g} s of being "
                "killed; its phase is not retried, since the old body may still run"
            )

    def _is_dead(self, slot: Slot) -> bool:
        """Wait for the death of a killed process; say whether it came in time."""
        deadline = time.monotonic() + self.limits.death_deadline_s
        if not self.log_server.gone(slot.source).wait(self.limits.death_deadline_s):
            return False
        try:
            if slot.process is not None:
                slot.process.wait(max(0.1, deadline - time.monotonic()))
        except psutil.TimeoutExpired:
            return False
        return True

    def _create(self, slot: Slot) -> Any:
        slot.actor = ExecutorActor.remote(slot.source, self.log_server.address)
        return slot.actor.start.remote(self._user_modules)

    def _replace(self, slot: Slot) -> None:
        with self._lock:
            if self._is_closed:
                return
            slot.generation += 1
            slot.info, slot.process, slot.key = None, None, None
            future = self._create(slot).future()
        future.add_done_callback(lambda done: self._on_started(slot, done))

    def _on_started(self, slot: Slot, future: concurrent.futures.Future[ExecutorInfo]) -> None:
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
        self._lose(slot)

    def _lose(self, slot: Slot) -> None:
        """Give a place up; with the last one, those who wait hear of it."""
        with self._lock:
            slot.is_lost = True
            try:
                self._check_not_lost()
            except ExecutorDiedError as exc:
                waiters, failure = [*self._waiters], exc
                self._waiters.clear()
            else:
                return
        for waiter in waiters:
            waiter.set_exception(failure)

    def _check_not_lost(self) -> None:
        if all(slot.is_lost for slot in self._slots):
            raise ExecutorDiedError("no executor is left: " + "; ".join(self.status()))

    def _ready(self, slot: Slot, info: ExecutorInfo) -> None:
        slot.info, slot.process = info, _local_process(info)
        slot.num_start_failures, slot.start_error = 0, ""
        self.release(slot)


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


def reachable_host() -> str:
    """Return loopback where the cluster is one host, else this host's address."""
    num_hosts = sum(node["Alive"] for node in ray.nodes())
    return "127.0.0.1" if num_hosts == 1 else ray.util.get_node_ip_address()


def is_local(info: ExecutorInfo) -> bool:
    """Say whether an executor is on this host."""
    return info.node_id == ray.get_runtime_context().get_node_id()


def _local_process(info: ExecutorInfo) -> psutil.Process | None:
    try:
        return psutil.Process(info.pid) if is_local(info) else None
    except psutil.NoSuchProcess:  # dead already; its stream says so
        return None


def _unwrapped(error: BaseException) -> BaseException:
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, BaseException) else error
