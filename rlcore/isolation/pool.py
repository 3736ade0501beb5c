"""Processes that run user code, each killed and replaced when it hangs, dies or grows.

Why not a library's pool: concurrent.futures and loky have no time limit per task. pebble has one,
but its worker handles SIGTERM in Python, so that a hang in C is ended by its SIGKILL 3 s later,
during which no other worker gets a task; and a worker that dies between tasks (the OOM killer's
favourite) breaks its pool for good. Here every process has its own pipe, nothing is shared.
"""

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass
from typing import Any

from rlcore.errors import ActorUnavailableError, ConfigError, DataError, RolloutError
from rlcore.isolation.messages import LENGTH, Reply, Setup

logger = logging.getLogger(__name__)

RECYCLE_SHARE = 0.5
"""A process is replaced when it has grown by this share of its memory limit."""

ENDING_S = 1.0
"""How long a process whose pipe is closed may take to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What user code may use, and how its failures are called."""

    timeout_s: float
    """Seconds of one call; then the process is killed."""
    start_s: float
    """Seconds of a start."""
    what: str
    """Names the user code in messages, such as `the reward function`."""
    timeout_key: str
    """Configuration key of `timeout_s`."""
    error: type[RolloutError]
    timeout_error: type[RolloutError]


class IsolatedProcess:
    """One process and its pipe."""

    def __init__(self, process: Process, limits: Limits, max_rss_mb: float) -> None:
        self._process = process
        self._limits = limits
        self._max_rss_mb = max_rss_mb
        self.is_usable = True

    @classmethod
    async def start(cls, setup: Setup, limits: Limits) -> "IsolatedProcess":
        """Start a process and wait until it has loaded the user code.

        Raises:
            ConfigError: it cannot; says why.
            RolloutError: of the kind `limits.error`: it died or was not ready in time.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rlcore.isolation.process",
            stdin=PIPE,
            stdout=PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        try:
            async with asyncio.timeout(limits.start_s):
                reply = await _exchange(process, setup)
        except EOFError as error:
            raise limits.error(f"the process for {limits.what} died: {error}") from error
        except TimeoutError:
            await _kill(process)
            raise limits.error(
                f"the process for {limits.what} was not ready after {limits.start_s:g} s "
                "(deadlines.start)"
            ) from None
        except BaseException:
            await _kill(process)
            raise
        if reply.status == "refused":
            await _kill(process)
            raise ConfigError(reply.message)
        return cls(process, limits, reply.rss_mb + RECYCLE_SHARE * setup.max_memory_mb)

    async def call(self, task: object) -> Any:
        """Run one task; `is_usable` is False afterwards if the process must be replaced.

        Raises:
            RolloutError: `limits.error`: the code raised, or the process died;
                `limits.timeout_error`: it took too long.
            DataError: its result is not what it should be.
            ActorUnavailableError: a collaborator of ours that it asks is not there.
        """
        limits = self._limits
        self.is_usable = False
        try:
            async with asyncio.timeout(limits.timeout_s):
                reply = await _exchange(self._process, task)
        except EOFError as error:
            raise limits.error(f"the process of {limits.what} died: {error}") from error
        except TimeoutError:
            raise limits.timeout_error(
                f"{limits.what} took longer than {limits.timeout_key}={limits.timeout_s:g} s; its "
                "process was killed"
            ) from None
        self.is_usable = reply.rss_mb <= self._max_rss_mb
        if not self.is_usable:
            logger.info("%s: its process has grown to %d MB", limits.what, reply.rss_mb)
        match reply.status:
            case "done":
                return reply.value
            case "bad_result":
                raise DataError(reply.message)
            case "unavailable":
                raise ActorUnavailableError(reply.message)
            case _:
                raise limits.error(f"{limits.what} raised\n{reply.message}")

    @property
    def was_killed(self) -> bool:
        """Whether somebody else has killed the process, such as the kernel when short of memory."""
        return self._process.returncode == -signal.SIGKILL

    async def kill(self) -> None:
        """End the process at once, whatever it is doing."""
        await _kill(self._process)


class IsolatedPool:
    """A fixed number of processes; tasks wait for a free one in order.

    Example:
        >>> pool = IsolatedPool(setup, limits, num_processes=2)
        >>> await pool.start()
        >>> value = await pool.call(task)
    """

    def __init__(self, setup: Setup, limits: Limits, *, num_processes: int) -> None:
        self._setup = setup
        self._limits = limits
        self._num_processes = num_processes
        self._free: asyncio.Queue[asyncio.Task[IsolatedProcess]] = asyncio.Queue()
        self._all: set[asyncio.Task[IsolatedProcess]] = set()
        self._kills: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.num_replaced = 0

    def begin(self) -> None:
        """Start the processes without waiting for them; `call` does."""
        for _ in range(self._num_processes):
            self._begin_process()

    async def start(self) -> None:
        """Start the processes and wait until they are ready.

        Raises:
            ConfigError: the user code cannot be loaded.
            RolloutError: a process does not start.
        """
        self.begin()
        try:
            await asyncio.gather(*self._all)
        except BaseException:
            await self.close()
            raise

    async def call(self, task: object) -> Any:
        """Run one task in the next free process; see IsolatedProcess.call.

        One whose process was killed from outside is run once more.
        """
        is_done, value = await self._call(task, is_last=False)
        if not is_done:
            _, value = await self._call(task, is_last=True)
        return value

    async def _call(self, task: object, *, is_last: bool) -> tuple[bool, Any]:
        """Return whether the task was done, and its value; it may be tried again if it was not."""
        starting = await self._free.get()
        try:
            # A caller that is cancelled must not end the start for the next one.
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._free.put_nowait(starting)
            raise
        except (ConfigError, RolloutError):
            self._replace(starting)
            raise
        try:
            return True, await process.call(task)
        except self._limits.timeout_error:
            raise
        except self._limits.error as error:
            if is_last or self._is_closed or not process.was_killed:
                raise
            logger.warning("%s; the task is run once more", error)
            return False, None
        finally:
            if process.is_usable:
                self._free.put_nowait(starting)
            else:
                self._kill_later(process)
                self._replace(starting)

    async def close(self) -> None:
        """Kill every process; nobody may wait for a call any more."""
        self._is_closed = True
        for starting in self._all:
            if starting.done() and not starting.cancelled() and starting.exception() is None:
                self._kill_later(starting.result())
            starting.cancel()
        await asyncio.gather(*self._all, *self._kills, return_exceptions=True)
        self._all.clear()

    def _begin_process(self) -> None:
        starting = asyncio.create_task(IsolatedProcess.start(self._setup, self._limits))
        self._all.add(starting)
        self._free.put_nowait(starting)

    def _replace(self, starting: asyncio.Task[IsolatedProcess]) -> None:
        if self._is_closed:
            return
        self.num_replaced += 1
        self._all.discard(starting)
        self._begin_process()

    def _kill_later(self, process: IsolatedProcess) -> None:
        killing = asyncio.create_task(process.kill())
        self._kills.add(killing)
        killing.add_done_callback(self._kills.discard)


async def _exchange(process: Process, message: object) -> Reply:
    """Send a message and return the answer.

    Raises:
        EOFError: the process is dead; says how it ended.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    content = pickle.dumps(message)
    try:
        process.stdin.write(LENGTH.pack(len(content)) + content)
        await process.stdin.drain()
        head = await process.stdout.readexactly(LENGTH.size)
        return pickle.loads(await process.stdout.readexactly(LENGTH.unpack(head)[0]))
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        # Let it end by itself first: to kill it now would lose how it ended.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), ENDING_S)
        await _kill(process)
        raise EOFError(_ending(process.returncode)) from error


async def _kill(process: Process) -> None:
    """End the process; who is cancelled meanwhile goes on when it is gone."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    ending = asyncio.create_task(process.wait())
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        await ending
        raise


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
