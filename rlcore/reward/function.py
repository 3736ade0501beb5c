"""The reward of a response: a built-in rule or the user's function, checked results.

A function that raises or returns something else than a finite number fails its session; such a
response never counts as reward 0, which would teach the policy that it was a bad answer.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, cast

from rlcore.config import RunConfig
from rlcore.errors import ConfigError, DataError
from rlcore.reward.rules import find_rule
from rlcore.user_code import load_user_object

RewardFunction = Callable[..., Any]
"""Sync or async (data_source, solution_str, ground_truth, extra_info, **kwargs) -> float | dict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """A checked score and what the function returned beside it."""

    score: float
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    """Holds `acc` when the function returned it or only a number."""


def load_reward_function(config: RunConfig) -> RewardFunction:
    """Return the configured reward function, with `reward_kwargs` bound.

    Raises:
        ConfigError: the file or function is missing or cannot be imported, or the function cannot
            be called as verl calls it.
    """
    custom = config.reward.custom_reward_function
    if custom.path is None:
        return rule_by_data_source
    function = load_user_object(custom.path, custom.name)
    if not callable(function):
        raise ConfigError(f"{custom.path}: {custom.name!r} is not a function")
    bound = partial(function, **custom.reward_kwargs)
    try:
        inspect.signature(bound).bind(
            data_source="", solution_str="", ground_truth="", extra_info={}
        )
    except TypeError as error:
        raise ConfigError(
            f"{custom.path}: {custom.name} must take (data_source, solution_str, ground_truth, "
            f"extra_info) and the keys of reward_kwargs: {error}"
        ) from error
    return bound


def rule_by_data_source(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    """Apply the built-in rule of the row's data source."""
    return find_rule(data_source)(data_source, solution_str, ground_truth, extra_info)


async def compute_reward(
    function: RewardFunction, solution_str: str, fields: Mapping[str, Any], pool: Executor
) -> Reward:
    """Score one response; a sync function runs in `pool`, an async one on the loop.

    Args:
        function: From `load_reward_function`.
        solution_str: The response's text.
        fields: The row's columns.
        pool: Threads for sync functions.

    Raises:
        DataError: the result is not a finite number or a mapping with a finite `score`.
    """
    call = partial(
        function,
        data_source=fields["data_source"],
        solution_str=solution_str,
        ground_truth=fields["reward_model"]["ground_truth"],
        extra_info=fields.get("extra_info") or {},
    )
    if _is_async(function):
        result = await cast("Awaitable[Any]", call())
    else:
        result = await asyncio.get_running_loop().run_in_executor(pool, call)
        if inspect.isawaitable(result):
            result = await result
    return check_result(result)


def check_result(result: object) -> Reward:
    """Return the reward that a function's result means.

    Raises:
        DataError: it is not a finite number, or a mapping without a finite `score`.
    """
    if isinstance(result, Mapping):
        values = {str(name): _plain(value) for name, value in result.items()}
        if "score" not in values:
            raise DataError(f"the reward function returned {sorted(values)} without 'score'")
        score = _finite(values.pop("score"), "score")
        return Reward(score=score, extra=values)
    score = _finite(_plain(result), "result")
    return Reward(score=score, extra={"acc": score})


def _is_async(function: RewardFunction) -> bool:
    inner = function.func if isinstance(function, partial) else function
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(
        getattr(inner, "__call__", None)  # noqa: B004  asks whether it is async, not callable
    )


def _plain(value: object) -> object:
    """Turn numpy and 0-dim tensor scalars into Python numbers: records are JSON."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "shape", None) == () else value


def _finite(value: object, what: str) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise DataError(
            f"the reward function's {what} must be a finite number, is "
            f"{type(value).__name__} {value!r}"
        )
    return float(value)
