"""What a scoring process does with a task."""

import inspect
from collections.abc import Awaitable, Callable

from rlcore.config import RunConfig
from rlcore.data.tokenizer import load_tokenizer
from rlcore.reward.function import (
    Reward,
    RewardTask,
    check_result,
    load_reward_function,
)
from rlcore.reward.model import ModelReward, check_address, is_discriminative

SCORER = "rlcore.reward.scoring:make_scorer"


def make_scorer(
    config: RunConfig, reward_router_address: str | None = None
) -> Callable[[RewardTask], Awaitable[Reward]]:
    """Return a function that scores a task as configured.

    Args:
        config: Names the reward function or model.
        reward_router_address: `host:port` of the run's reward model.

    Raises:
        ConfigError: it cannot be loaded, or there is no reward model to ask.
    """
    check_address(config, reward_router_address)
    if is_discriminative(config):
        assert reward_router_address is not None  # checked above
        model = ModelReward(reward_router_address, config.reward.timeout)

        async def score_by_model(task: RewardTask) -> Reward:
            return model.score(task.messages, task.solution_str)

        return score_by_model
    model_path = config.reward.reward_model.model_path or ""
    trusted = config.actor_rollout_ref.model.trust_remote_code
    function = load_reward_function(
        config,
        {
            "reward_router_address": lambda: reward_router_address,
            "reward_model_tokenizer": lambda: load_tokenizer(model_path, trusted),
        },
    )

    async def score(task: RewardTask) -> Reward:
        result = function(**task.arguments())
        return check_result(await result if inspect.isawaitable(result) else result)

    return score
