"""The reward of a response: a built-in rule or the user's function, checked results.

A function that raises or returns something else than a finite number fails its session; such a
response never counts as reward 0, which would teach the policy that it was a bad answer.
"""

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

from rlcore.config import RunConfig
from rlcore.errors import ConfigError, DataError
from rlcore.reward.rules import find_rule
from rlcore.user_code import load_user_object

RewardFunction = Callable[..., Any]
"""Sync or async (data_source, solution_str, ground_truth, extra_info, **kwargs) -> float | dict."""

MAX_EXTRA_CHARACTERS = 20_000
NUM_SAMPLED = "num_sampled_tokens"
"""Under this name an unscored session keeps what `RewardTask.num_tokens` will be."""
JUDGE_ARGUMENTS = ("reward_router_address", "reward_model_tokenizer")
"""Where the reward model is asked (`host:port`, an OpenAI-like API), and its tokenizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardTask:
    """One response to be scored: plain data, it goes to another process."""

    data_source: str
    solution_str: str
    """The response's text."""
    ground_truth: Any
    extra_info: dict[str, Any]
    """The row's, with `phase` (train or validate), `global_steps`, `num_turns`, `tool_rewards`.

    And what the agent loop put under `for_reward` of its output's `extra_fields`.
    """
    num_tokens: int
    """Of the response, without those of tools."""
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The prompt, for a reward model."""

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of a reward function, as verl passes them."""
        return {
            "data_source": self.data_source,
            "solution_str": self.solution_str,
            "ground_truth": self.ground_truth,
            "extra_info": self.extra_info,
        }


def make_task(
    fields: Mapping[str, Any],
    messages: list[dict[str, Any]],
    response: str,
    *,
    num_tokens: int,
    extra_info: Mapping[str, Any],
) -> RewardTask:
    """Return the task of scoring a response.

    Args:
        fields: Of the row: data_source, reward_model, extra_info.
        messages: The prompt.
        response: The response's text.
        num_tokens: Of the response.
        extra_info: Goes over the row's.
    """
    return RewardTask(
        data_source=fields["data_source"],
        solution_str=response,
        ground_truth=fields["reward_model"]["ground_truth"],
        extra_info={**(fields.get("extra_info") or {}), **extra_info},
        num_tokens=num_tokens,
        messages=messages,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """A checked score and what the function returned beside it."""

    score: float
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    """Holds `acc` when the function returned it or only a number."""


def load_reward_function(
    config: RunConfig, judge: Mapping[str, Callable[[], Any]] | None = None
) -> RewardFunction:
    """Return the configured reward function, with `reward_kwargs` bound.

    Several named ones (`reward.functions`) become one, an async function that adds them up.

    Args:
        config: Names it.
        judge: What makes the arguments of `JUDGE_ARGUMENTS`, for functions that take them; None:
            they are None, to check the function.

    Raises:
        ConfigError: a file or function is missing or cannot be imported, or the function cannot
            be called as verl calls it.
    """
    reward = config.reward
    judge = judge or {name: lambda: None for name in JUDGE_ARGUMENTS}
    if not reward.reward_model.enable:
        judge = {}
    if reward.functions:
        return WeightedSum(
            [
                NamedReward(
                    name=part.name,
                    weight=part.weight,
                    function=_load(part.path, part.function, part.reward_kwargs, judge),
                )
                for part in reward.functions
            ]
        )
    custom = reward.custom_reward_function
    return _load(custom.path, custom.name, custom.reward_kwargs, judge)


def uses_rules(config: RunConfig) -> bool:
    """Tell whether the rules by data source score, so that every source needs one."""
    reward = config.reward
    if reward.functions:
        return any(part.path is None for part in reward.functions)
    return reward.custom_reward_function.path is None and not reward.reward_model.enable


def rule_by_data_source(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    """Apply the built-in rule of the row's data source."""
    return find_rule(data_source)(data_source, solution_str, ground_truth, extra_info)


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedReward:
    """One part of a reward."""

    name: str
    weight: float
    function: RewardFunction


class WeightedSum:
    """Several reward functions as one: the weighted sum, and each part's own score beside it."""

    def __init__(self, parts: Sequence[NamedReward]) -> None:
        self._parts = list(parts)

    async def __call__(self, **arguments: Any) -> dict[str, Any]:
        """Return `score`, each part's score under its name, what it said under `name_key`.

        `acc` is that of the first part which gives one.

        Raises:
            DataError: a part returned no finite score; names the part.
        """
        total = 0.0
        extra: dict[str, Any] = {}
        for part in self._parts:
            result = part.function(**arguments)
            if inspect.isawaitable(result):
                result = await result
            try:
                reward = check_result(result)
            except DataError as error:
                raise DataError(f"reward {part.name}: {error}") from error
            total += part.weight * reward.score
            extra[part.name] = reward.score
            for key, value in reward.extra.items():
                extra.setdefault("acc" if key == "acc" else f"{part.name}_{key}", value)
        return {"score": total, **extra}


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
        _check_json(values)
        return Reward(score=score, extra=values)
    score = _finite(_plain(result), "result")
    return Reward(score=score, extra={"acc": score})


def _load(
    path: str | None,
    name: str,
    kwargs: Mapping[str, Any],
    judge: Mapping[str, Callable[[], Any]],
) -> RewardFunction:
    if path is None:
        return rule_by_data_source
    function = load_user_object(path, name)
    if not callable(function):
        raise ConfigError(f"{path}: {name!r} is not a function")
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    asked = {key: make() for key, make in judge.items() if takes_all or key in parameters}
    bound = partial(function, **{**asked, **kwargs})
    try:
        inspect.signature(bound).bind(
            data_source="", solution_str="", ground_truth="", extra_info={}
        )
    except TypeError as error:
        raise ConfigError(
            f"{path}: {name} must take (data_source, solution_str, ground_truth, "
            f"extra_info) and the keys of reward_kwargs: {error}"
        ) from error
    return bound


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


def _check_json(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        try:
            size = len(json.dumps(value))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the reward function's {name} is {type(value).__name__}; what stands beside the "
                f"score is stored as JSON: {error}"
            ) from error
        if size > MAX_EXTRA_CHARACTERS:
            raise DataError(
                f"the reward function's {name} takes {size} characters as JSON, more than "
                f"{MAX_EXTRA_CHARACTERS}: it would be stored with every response"
            )
