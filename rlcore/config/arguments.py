"""The keyword arguments that a configuration gives the functions of `rlcore.algorithms`.

Example:
    >>> arguments(config, "gae")
    {"gamma": 1.0, "lam": 1.0, "whiten": True}
"""

from collections.abc import Collection
from typing import Any

from rlcore.config.argument_table import ARGUMENTS, ESTIMATORS, LOSSES
from rlcore.config.corrections import importance_weights
from rlcore.config.run import RunConfig


def arguments(config: RunConfig, function: str) -> dict[str, Any]:
    """Return the keyword arguments that `config` gives a function of rlcore.algorithms.

    Args:
        config: A checked configuration.
        function: One that has a single call; `rollout_is_weights` and `rejection_mask` are told by
            `rlcore.config.corrections`.
    """
    return {
        row.name: row.value(config)
        for row in ARGUMENTS
        if row.function == function and "," not in row.name
    }


def estimator_settings(config: RunConfig, name: str, reads: Collection[str]) -> dict[str, Any]:
    """Return the keyword arguments of an estimator; see `_settings`."""
    return _settings(config, ESTIMATORS, name, reads)


def loss_settings(config: RunConfig, name: str, reads: Collection[str]) -> dict[str, Any]:
    """Return the keyword arguments of a policy loss; see `_settings`."""
    return _settings(config, LOSSES, name, reads)


def weight_settings(config: RunConfig) -> dict[str, Any] | None:
    """Return the arguments of `rollout_is_weights`, or None where no weight is asked for."""
    weights = importance_weights(config)
    return None if weights is None else {**weights, **arguments(config, "rollout_is_weights")}


def _settings(
    config: RunConfig, functions: dict[str, str], name: str, reads: Collection[str]
) -> dict[str, Any]:
    """Return what a registered entry is given: one of the user's own, what it declares to read.

    Where functions disagree on an argument of one name (agg, of which some have defaults of their
    own), the first in the table gives it.
    """
    if name in functions:
        return arguments(config, functions[name])
    offered: dict[str, Any] = {}
    for function in reversed(functions.values()):
        offered |= arguments(config, function)
    return {argument: value for argument, value in offered.items() if argument in reads}


def keys_read_by(function: str) -> frozenset[str]:
    """Return the keys that give `function` an argument."""
    return frozenset(row.key for row in ARGUMENTS if row.function == function and row.key)


def keys_of(functions: dict[str, str]) -> frozenset[str]:
    """Return the keys that give any of `functions` (ESTIMATORS or LOSSES) an argument."""
    return frozenset(key for name in functions.values() for key in keys_read_by(name))
