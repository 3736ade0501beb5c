"""RewardLoopManager: scores responses while others are still being generated (verl's name)."""

from typing import Protocol

from rlcore.config import RunConfig
from rlcore.errors import RewardError, RewardTimeoutError
from rlcore.isolation.messages import Setup
from rlcore.isolation.pool import IsolatedPool, Limits
from rlcore.reward.function import Reward, RewardTask
from rlcore.reward.managers import REWARD_MANAGERS
from rlcore.reward.scoring import SCORER


class RewardScorer(Protocol):
    """What an agent loop worker needs to score responses."""

    async def start(self) -> None:
        """Get ready."""
        ...

    async def score(self, task: RewardTask) -> Reward:
        """Score one response."""
        ...

    async def close(self) -> None:
        """Free everything."""
        ...


class RewardLoopManager:
    """The reward manager of the configuration over processes that run the reward function."""

    def __init__(self, config: RunConfig, reward_router_address: str | None = None) -> None:
        """Make a manager; `start` starts its processes.

        Args:
            config: Of the run.
            reward_router_address: Where its reward model is asked, if it has one.
        """
        reward = config.reward
        num_processes = reward.num_workers
        if reward.reward_manager.name in {"rate_limited", "limited"}:
            num_processes = reward.max_concurrent
        self._pool = IsolatedPool(
            Setup(
                factory=SCORER,
                config=config,
                max_memory_mb=reward.max_memory_mb,
                arguments={"reward_router_address": reward_router_address},
            ),
            Limits(
                timeout_s=reward.timeout,
                start_s=config.deadlines.start,
                what="the reward function",
                timeout_key="reward.timeout",
                error=RewardError,
                timeout_error=RewardTimeoutError,
            ),
            num_processes=max(1, num_processes // config.num_reward_managers),
        )
        self._manager = REWARD_MANAGERS.get(reward.reward_manager.name)(config)

    @property
    def num_replaced(self) -> int:
        """How many processes were killed and replaced."""
        return self._pool.num_replaced

    async def start(self) -> None:
        """Start the processes.

        Raises:
            ConfigError: the reward function cannot be loaded.
            RewardError: a process does not start.
        """
        await self._pool.start()

    async def score(self, task: RewardTask) -> Reward:
        """Score one response.

        Raises:
            RewardError: the function raised, hung, or its process died.
            DataError: the result is no reward.
            ActorUnavailableError: the run's reward model is not there.
        """
        return await self._manager.run(task, self._pool.call)

    async def close(self) -> None:
        """Kill the processes."""
        await self._pool.close()
