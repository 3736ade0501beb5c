"""Rules between keys: each returns the problems it finds, with the sums shown.

A rule names every key whose value is part of its reason, in `involves`, so that nothing is said
about a default that stands in for a wrong value.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from rlcore.config import (
    rules_algorithm,
    rules_async,
    rules_batches,
    rules_devices,
    rules_distillation,
    rules_rollout,
    rules_training,
    rules_weights,
)
from rlcore.config.data_rules import DATA_RULES
from rlcore.config.names import unknown_names
from rlcore.config.pending import NotYet
from rlcore.config.problems import Problem
from rlcore.config.reward_rules import REWARD_RULES
from rlcore.config.run import RunConfig
from rlcore.config.tree import default_of, markers, value_at

Rule = Callable[[RunConfig], Iterator[Problem]]


def not_there_yet(config: RunConfig) -> Iterator[Problem]:
    """Keys of features that are not there ask for what happens anyway."""
    for path, marker in markers().items():
        if not isinstance(marker, NotYet):
            continue
        value = value_at(config, path)
        if not marker.admits(value, default_of(path)):
            yield Problem(
                path=path, value=value, reason=marker.reason, fix=marker.fix, is_unsupported=True
            )


RULES: tuple[Rule, ...] = (
    unknown_names,
    not_there_yet,
    *rules_batches.RULES,
    *rules_algorithm.RULES,
    *rules_training.RULES,
    *rules_distillation.RULES,
    *rules_rollout.RULES,
    *rules_weights.RULES,
    *rules_async.RULES,
    *rules_devices.RULES,
    *DATA_RULES,
    *REWARD_RULES,
)


def broken_rules(config: RunConfig) -> list[Problem]:
    """Return the problems that all rules find in `config`, one per key with all its reasons."""
    found: dict[str, Problem] = {}
    for rule in RULES:
        for problem in rule(config):
            first = found.get(problem.path)
            found[problem.path] = problem if first is None else _joined(first, problem)
    return list(found.values())


def _joined(first: Problem, second: Problem) -> Problem:
    return replace(
        first,
        reason=f"{first.reason}; besides, {second.reason}",
        is_idle=first.is_idle and second.is_idle,
        involves=(*first.involves, *second.involves),
    )
