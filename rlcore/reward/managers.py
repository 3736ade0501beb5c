"""Reward managers (verl's names): what stands round a reward function.

`naive` passes the score on. `dapo` adds a soft punishment of overlong responses (DAPO, Yu et al.
2025, arXiv:2503.14476, eq. 13). `rate_limited` spaces calls out for a judge that counts requests or
tokens; unlike verl's, a judge that fails fails the session and is never a score of 0.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from rlcore.config import RunConfig
from rlcore.config.arguments import arguments
from rlcore.registry import Registry
from rlcore.reward.function import Reward, RewardTask

Score = Callable[[RewardTask], Awaitable[Reward]]


class RewardManager(Protocol):
    """Scores one response by way of `score`, which calls the reward function."""

    async def run(self, task: RewardTask, score: Score) -> Reward:
        """Return the reward of a response."""
        ...


REWARD_MANAGERS: Registry[Callable[[RunConfig], RewardManager]] = Registry("reward manager")


@REWARD_MANAGERS.register("naive")
class NaiveRewardManager:
    """The function's score as it is."""

    def __init__(self, config: RunConfig) -> None:
        del config  # it has no settings

    async def run(self, task: RewardTask, score: Score) -> Reward:
        """Return what the function says."""
        return await score(task)


@REWARD_MANAGERS.register("dapo")
class DapoRewardManager:
    """The function's score and `rlcore.algorithms.overlong_penalty` of what the model wrote."""

    def __init__(self, config: RunConfig) -> None:
        self._buffer = config.reward.reward_kwargs.overlong_buffer_cfg
        self._penalty: Callable[[int], float] = lambda _: 0.0
        if self._buffer.enable:
            # Agent loop workers do without torch, except for this.
            from torch import tensor

            from rlcore.algorithms import overlong_penalty

            settings = arguments(config, "overlong_penalty")
            self._penalty = lambda tokens: float(overlong_penalty(tensor([tokens]), **settings))

    async def run(self, task: RewardTask, score: Score) -> Reward:
        """Return the function's score with the penalty added."""
        reward = await score(task)
        if not self._buffer.enable:
            return reward
        penalty = self._penalty(task.num_tokens)
        extra = dict(reward.extra)
        if self._buffer.log:
            extra |= {"overlong_reward": penalty, "overlong": float(penalty < 0)}
        return Reward(score=reward.score + penalty, extra=extra)


class Pace:
    """Spaces out what may happen so many times a minute; without bursts."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds_each = 60 / per_minute
        self._clock = clock
        self._next = 0.0

    def reserve(self, amount: float = 1) -> float:
        """Take a place in the line; return how many seconds it begins from now."""
        now = self._clock()
        start = max(now, self._next)
        self._next = start + amount * self._seconds_each
        return start - now


@REWARD_MANAGERS.register("limited")
@REWARD_MANAGERS.register("rate_limited")
class RateLimitedRewardManager:
    """The function's score, asked for at a limited rate.

    How many run at a time is the number of processes (`reward.max_concurrent`). Limits are those
    of the whole run, shared out over its reward managers.
    """

    def __init__(self, config: RunConfig) -> None:
        reward = config.reward
        num_managers = config.num_reward_managers
        self._paces: list[tuple[Pace, float]] = []
        if reward.max_rpm is not None:
            self._paces.append((Pace(reward.max_rpm / num_managers), 1))
        if reward.max_tpm is not None:
            pace = Pace(reward.max_tpm / num_managers)
            self._paces.append((pace, reward.estimated_tokens_per_request))

    async def run(self, task: RewardTask, score: Score) -> Reward:
        """Wait for this response's turn, then return what the function says."""
        await asyncio.sleep(max((p.reserve(amount) for p, amount in self._paces), default=0))
        return await score(task)
