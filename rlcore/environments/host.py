"""Environments in processes of their own: one may hang, crash or leak without harm to the worker.

An episode lives in one process from turn to turn. Should that process be replaced, the episode is
played again from its seed and the actions so far, so every task carries all of them.
"""

import random
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from rlcore.config import RunConfig
from rlcore.environments.base import EnvironmentSpec, Observation
from rlcore.errors import EnvironmentTimeoutError, TextEnvironmentError
from rlcore.isolation.messages import Setup
from rlcore.isolation.pool import IsolatedPool, Limits

EPISODES = "rlcore.environments.host:make_episodes"
MAX_MEMORY_MB = 4096
MAX_EPISODES = 1024
"""So many are kept by a process; the one that has waited longest would be played again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeTask:
    """One action: plain data, it goes to another process."""

    episode_id: str
    spec: EnvironmentSpec
    actions: tuple[str, ...]
    """All actions so far, the new one last."""


class Episode:
    """An environment that was entered, and its random sources.

    Libraries draw from those of the process, which many episodes share: each has its own state of
    them, put in place while it plays.
    """

    def __init__(self, spec: EnvironmentSpec) -> None:
        """Enter the environment.

        Raises:
            ConfigError: its library is unknown or not installed.
            DataError: there is no such environment.
        """
        self.num_actions = 0
        self._python = random.Random(spec.seed).getstate()
        self._numpy = np.random.RandomState(spec.seed % 2**32).get_state()
        with self._own_randomness():
            self._environment = spec.make()
            self.first = self._environment.reset(spec.seed)

    def step(self, action: str) -> Observation:
        """Answer an action."""
        self.num_actions += 1
        with self._own_randomness():
            return self._environment.step(action)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        kept = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(kept[0])
            np.random.set_state(kept[1])


class Episodes:
    """The episodes of one process."""

    def __init__(self) -> None:
        self._running: OrderedDict[str, Episode] = OrderedDict()

    def __call__(self, task: EpisodeTask) -> Observation:
        """Answer the last action of a task, after those that its episode has not seen here."""
        episode = self._running.pop(task.episode_id, None)
        if episode is None or episode.num_actions >= len(task.actions):
            episode = Episode(task.spec)
        observation = episode.first
        for action in task.actions[episode.num_actions :]:
            observation = episode.step(action)
            if observation.is_done:
                return observation
        self._running[task.episode_id] = episode
        if len(self._running) > MAX_EPISODES:
            self._running.popitem(last=False)
        return observation


def make_episodes(config: RunConfig) -> Callable[[EpisodeTask], Observation]:
    """Return what an environment process does with a task."""
    del config  # episodes are named by rows
    return Episodes()


class EnvironmentHost:
    """The environment processes of a worker; they start with the first action."""

    def __init__(self, config: RunConfig) -> None:
        settings = config.actor_rollout_ref.rollout.multi_turn
        # One pool of one process each: an episode stays where it is.
        self._pools = [
            IsolatedPool(
                Setup(factory=EPISODES, config=config, max_memory_mb=MAX_MEMORY_MB),
                Limits(
                    timeout_s=settings.tool_timeout,
                    start_s=config.deadlines.start,
                    what="the environment",
                    timeout_key="multi_turn.tool_timeout",
                    error=TextEnvironmentError,
                    timeout_error=EnvironmentTimeoutError,
                ),
                num_processes=1,
            )
            for _ in range(settings.num_tool_workers)
        ]
        self._begun: set[int] = set()

    async def step(self, task: EpisodeTask) -> Observation:
        """Answer the last action of a task.

        Raises:
            TextEnvironmentError: the environment raised or hung, or its process died.
            DataError: there is no such environment.
        """
        number = zlib.crc32(task.episode_id.encode()) % len(self._pools)
        if number not in self._begun:
            self._begun.add(number)
            self._pools[number].begin()
        return await self._pools[number].call(task)

    async def close(self) -> None:
        """End the processes."""
        for pool in self._pools:
            await pool.close()
