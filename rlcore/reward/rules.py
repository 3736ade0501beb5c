"""The built-in rewards, chosen by a row's data source; `*` in a name stands for anything."""

import json
import logging
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, cast

from rlcore.errors import ConfigError, DataError
from rlcore.registry import Registry
from rlcore.reward.extraction import ANSWER_EXTRACTORS

Verifier = Callable[[str, dict[str, Any]], float]
RewardRule = Callable[[str, str, Any, Mapping[str, Any]], dict[str, float]]

_GSM8K_ANSWER = re.compile(r"####\s*(-?\$?-?[0-9][0-9.,]*)")

REWARD_RULES = Registry[RewardRule]("reward rule")


def find_rule(data_source: str) -> RewardRule:
    """Return the rule for a data source; an exact name goes before a pattern.

    Raises:
        ConfigError: there is none; lists those there are.
    """
    if data_source in REWARD_RULES:
        return REWARD_RULES.get(data_source)
    for pattern in REWARD_RULES:
        if fnmatchcase(data_source, pattern):
            return REWARD_RULES.get(pattern)
    raise ConfigError(
        f"no reward rule for data source {data_source!r}; known: {', '.join(REWARD_RULES)}; "
        "or set reward.custom_reward_function.path"
    )


@REWARD_RULES.register("reasoning_gym/*")
def reasoning_gym_rule(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    """Take the answer out of the response and let the task's own verifier judge it.

    The score is the accuracy: 1 where the verifier gives 1.0, else 0. Its part marks are not used:
    they pay for form, e.g. 0.01 for any number.

    Raises:
        DataError: the row lacks what the verifier needs.
    """
    try:
        entry = json.loads(extra_info["entry"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise DataError(
            f"extra_info.entry must be reasoning-gym's entry as JSON: {type(error).__name__}: "
            f"{error}"
        ) from error
    extract = ANSWER_EXTRACTORS.get(extra_info.get("extraction") or "last_integer")
    answer = extract(solution_str)
    scorer = _verifier(data_source.partition("/")[2])
    accuracy = 1.0 if answer is not None and scorer(answer, entry) == 1.0 else 0.0
    return {"score": accuracy, "acc": accuracy}


@lru_cache(maxsize=32)
def _verifier(task: str) -> Verifier:
    # Brings matplotlib and sympy, 2 s: only runs on its tasks pay that, in a reward thread.
    import reasoning_gym

    try:
        scorer = reasoning_gym.get_score_answer_fn(task)
    except ValueError as error:
        raise ConfigError(f"reasoning-gym has no task {task!r}: {error}") from error
    # The package annotates it as a function without arguments.
    return cast("Verifier", scorer)


@REWARD_RULES.register("openai/gsm8k")
def gsm8k_rule(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    """Compare the number behind the last `####` with the true one, as GSM8K's own format asks."""
    found = _GSM8K_ANSWER.findall(solution_str)
    truth = _as_number(str(ground_truth).rpartition("####")[2])
    accuracy = float(bool(found) and truth is not None and _as_number(found[-1]) == truth)
    return {"score": accuracy, "acc": accuracy}


@REWARD_RULES.register("lighteval/MATH")
@REWARD_RULES.register("DigitalLearningGmbH/MATH-lighteval")
@REWARD_RULES.register("HuggingFaceH4/MATH-500")
def math_rule(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    """Compare mathematical expressions by their value, with math-verify.

    Its own time limits are off: they use signals, and `reward.timeout` is a hard one.

    Raises:
        DataError: the ground truth cannot be read as mathematics.
    """
    # Brings sympy, 1 s: only runs on mathematics pay that.
    from math_verify import parse, verify

    # It warns at every call that its limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    truth = _math_truth(str(ground_truth))
    answer = parse(solution_str, parsing_timeout=0)
    accuracy = float(verify(truth, answer, timeout_seconds=None))
    return {"score": accuracy, "acc": accuracy}


@REWARD_RULES.register("exact_match/*")
@REWARD_RULES.register("exact_match")
def exact_match_rule(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    """Pay a response whose answer equals `ground_truth`, white space at the ends apart.

    `extra_info.extraction` names how the answer is found; without it, it is the whole response.
    """
    answer = ANSWER_EXTRACTORS.get(extra_info.get("extraction") or "stripped")(solution_str)
    accuracy = float(answer is not None and answer == str(ground_truth).strip())
    return {"score": accuracy, "acc": accuracy}


@REWARD_RULES.register("textarena/*")
@REWARD_RULES.register("environment/*")
def environment_rule(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    """Pay what the environment paid for the episode.

    Raises:
        DataError: no environment was played.
    """
    if "environment_reward" not in extra_info:
        raise DataError(
            f"data source {data_source} is paid by its environment; set "
            "actor_rollout_ref.rollout.agent.default_agent_loop=environment_agent, or the rows' "
            "agent_name"
        )
    score = float(extra_info["environment_reward"])
    return {"score": score, "acc": float(extra_info.get("environment_solved", score >= 1))}


@lru_cache(maxsize=4096)
def _math_truth(ground_truth: str) -> list[Any]:
    from math_verify import parse

    for text in (f"${ground_truth}$", ground_truth):
        if parsed := parse(text, parsing_timeout=0):
            return parsed
    raise DataError(f"ground_truth {ground_truth!r} cannot be read as mathematics")


def _as_number(text: str) -> Decimal | None:
    try:
        return Decimal(text.strip().replace(",", "").lstrip("$").rstrip("."))
    except InvalidOperation:
        return None


@REWARD_RULES.register("rollflow/letters")
def letters_rule(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> dict[str, float]:
    """Pay the share of the response's characters that are among the letters of `ground_truth`.

    The task of the tiny model: learnable without being able to read. Accuracy: at least half.
    """
    hits = sum(character in ground_truth for character in solution_str)
    score = hits / len(solution_str) if solution_str else 0.0
    return {"score": score, "acc": float(score >= 0.5)}
