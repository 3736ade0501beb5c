"""A reward scorer without processes, for tests of what stands around rewards."""

import inspect

from rlcore.config import RunConfig
from rlcore.reward.function import (
    Reward,
    RewardFunction,
    RewardTask,
    check_result,
    load_reward_function,
)


class InlineRewards:
    """Calls the function on the event loop.

    Attributes:
        tasks: What was to be scored, in order.
    """

    def __init__(self, function: RewardFunction) -> None:
        self.tasks: list[RewardTask] = []
        self._function = function

    @classmethod
    def from_config(cls, config: RunConfig) -> "InlineRewards":
        """Return a scorer by the configured function."""
        return cls(load_reward_function(config))

    async def start(self) -> None:
        """Nothing has to be started."""

    async def score(self, task: RewardTask) -> Reward:
        """Score one response."""
        self.tasks.append(task)
        result = self._function(**task.arguments())
        return check_result(await result if inspect.isawaitable(result) else result)

    async def close(self) -> None:
        """Nothing has to be freed."""
