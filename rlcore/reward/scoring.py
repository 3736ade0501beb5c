"""What a scoring process does with a task."""

import inspect
from collections.abc import Awaitable, Callable

from rlcore.config import RunConfig
from rlcore.reward.function import Reward, RewardTask, check_result, load_reward_function

SCORER = "rlcore.reward.scoring:make_scorer"


def make_scorer(config: RunConfig) -> Callable[[RewardTask], Awaitable[Reward]]:
    """Return a function that scores a task by the configured reward function.

    Raises:
        ConfigError: it cannot be loaded.
    """
    function = load_reward_function(config)

    async def score(task: RewardTask) -> Reward:
        result = function(**task.arguments())
        return check_result(await result if inspect.isawaitable(result) else result)

    return score
