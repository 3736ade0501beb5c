"""Processes that score, each killed and replaced when it hangs, dies or grows.

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
from typing import cast

from rlcore.config import RunConfig
from rlcore.errors import ConfigError, DataError, RewardError, RewardTimeoutError
from rlcore.reward.function import Reward, RewardTask
from rlcore.reward.messages import LENGTH, Reply

logger = logging.getLogger(__name__)

RECYCLE_SHARE = 0.5
"""A process is replaced when it has grown by this share of `reward.max_memory_mb`."""

ENDING_S = 1.0
"""How long a process whose pipe is closed may take to end."""


class ScoringProcess:
    """One process and its pipe."""

    def __init__(self, process: Process, ready: Reply, max_growth_mb: float) -> None:
        self._process = process
        self._max_rss_mb = ready.rss_mb + max_growth_mb
        self.is_usable = True

    @classmethod
    async def start(cls, config: RunConfig) -> "ScoringProcess":
        """Start a process and wait until it has loaded the reward function.

        Raises:
            ConfigError: it cannot; says why.
            RewardError: it died or was not ready within `deadlines.start`.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rlcore.reward.process",
            stdin=PIPE,
            stdout=PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        try:
            async with asyncio.timeout(config.deadlines.start):
                reply = await _exchange(process, config)
        except TimeoutError:
            await _kill(process)
            raise RewardError(
                "a reward process was not ready within "
                f"deadlines.start={config.deadlines.start:g} s"
            ) from None
        except BaseException:
            await _kill(process)
            raise
        if reply.status == "refused":
            await _kill(process)
            raise ConfigError(reply.message)
        return cls(process, reply, RECYCLE_SHARE * config.reward.max_memory_mb)

    async def score(self, task: RewardTask, timeout_s: float) -> Reward:
        """Score one response; `is_usable` is False afterwards if the process must be replaced.

        Raises:
            RewardError: the function raised, or the process died.
            RewardTimeoutError: it took longer than `timeout_s`.
            DataError: the result is no reward.
        """
        self.is_usable = False
        try:
            async with asyncio.timeout(timeout_s):
                reply = await _exchange(self._process, task)
        except TimeoutError:
            raise RewardTimeoutError(
                f"the reward function took longer than reward.timeout={timeout_s:g} s; its process "
                "was killed"
            ) from None
        self.is_usable = reply.rss_mb <= self._max_rss_mb
        if not self.is_usable:
            logger.info(
                "a reward process has grown to %d MB and is replaced (reward.max_memory_mb)",
                reply.rss_mb,
            )
        match reply.status:
            case "scored" if reply.reward is not None:
                return reply.reward
            case "bad_result":
                raise DataError(reply.message)
            case _:
                raise RewardError(f"the reward function raised\n{reply.message}")

    @property
    def was_killed(self) -> bool:
        """Whether somebody else has killed the process, such as the kernel when short of memory."""
        return self._process.returncode == -signal.SIGKILL

    async def kill(self) -> None:
        """End the process at once, whatever it is doing."""
        await _kill(self._process)


class RewardPool:
    """A fixed number of scoring processes; responses wait for a free one in order.

    Example:
        >>> pool = RewardPool(config, num_processes=2)
        >>> await pool.start()
        >>> reward = await pool.score(task)
    """

    def __init__(self, config: RunConfig, *, num_processes: int) -> None:
        self._config = config
        self._timeout_s = config.reward.timeout
        self._num_processes = num_processes
        self._free: asyncio.Queue[asyncio.Task[ScoringProcess]] = asyncio.Queue()
        self._all: set[asyncio.Task[ScoringProcess]] = set()
        self._kills: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.num_replaced = 0

    async def start(self) -> None:
        """Start the processes.

        Raises:
            ConfigError: the reward function cannot be loaded.
            RewardError: a process does not start.
        """
        for _ in range(self._num_processes):
            self._begin_process()
        try:
            await asyncio.gather(*self._all)
        except BaseException:
            await self.close()
            raise

    async def score(self, task: RewardTask) -> Reward:
        """Score one response in the next free process.

        One whose process was killed from outside is scored once more.

        Raises:
            RewardError: the function raised, hung, or its process died.
            DataError: the result is no reward.
        """
        reward = await self._score(task, is_last=False)
        return reward or cast("Reward", await self._score(task, is_last=True))

    async def _score(self, task: RewardTask, *, is_last: bool) -> Reward | None:
        """Return the reward, or None where the process was killed and another try may be made."""
        starting = await self._free.get()
        try:
            # A caller that is cancelled must not end the start for the next one.
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._free.put_nowait(starting)
            raise
        except (ConfigError, RewardError):
            self._replace(starting)
            raise
        try:
            return await process.score(task, self._timeout_s)
        except RewardTimeoutError:
            raise
        except RewardError as error:
            if is_last or self._is_closed or not process.was_killed:
                raise
            logger.warning("%s; the response is scored once more", error)
            return None
        finally:
            if process.is_usable:
                self._free.put_nowait(starting)
            else:
                self._kill_later(process)
                self._replace(starting)

    async def close(self) -> None:
        """Kill every process; nobody may wait for a score any more."""
        self._is_closed = True
        for starting in self._all:
            if starting.done() and not starting.cancelled() and starting.exception() is None:
                self._kill_later(starting.result())
            starting.cancel()
        await asyncio.gather(*self._all, *self._kills, return_exceptions=True)
        self._all.clear()

    def _begin_process(self) -> None:
        starting = asyncio.create_task(ScoringProcess.start(self._config))
        self._all.add(starting)
        self._free.put_nowait(starting)

    def _replace(self, starting: asyncio.Task[ScoringProcess]) -> None:
        if self._is_closed:
            return
        self.num_replaced += 1
        self._all.discard(starting)
        self._begin_process()

    def _kill_later(self, process: ScoringProcess) -> None:
        killing = asyncio.create_task(process.kill())
        self._kills.add(killing)
        killing.add_done_callback(self._kills.discard)


async def _exchange(process: Process, message: object) -> Reply:
    """Send a message and return the answer.

    Raises:
        RewardError: the process is dead.
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
        raise RewardError(f"the reward process died: {_ending(process.returncode)}") from error


async def _kill(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    await process.wait()


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
