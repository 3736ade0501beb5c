"""From preset, partial tree and overrides to one checked `RunConfig`, or all problems at once."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.config.idle import idle_keys
from rlcore.config.keys import classify, is_known, not_a_section, unknown_key
from rlcore.config.overrides import Override, Overrides, parse_overrides
from rlcore.config.presets import read_preset
from rlcore.config.problems import Problem, report, show
from rlcore.config.run import RunConfig
from rlcore.config.tree import Tree, get, merge, put, remove, section_paths
from rlcore.config.values import validate_tree
from rlcore.errors import ConfigError, UnsupportedVerlKeyError


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfig:
    """A configuration that can be run, and what is worth saying about it."""

    config: RunConfig
    notices: list[str]
    """Keys that ask for what happens anyway, or that have no effect beside others."""
    source: str
    """Where it came from: the preset and the number of overrides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """What came of reading a configuration; it can be run when `problems` is empty."""

    config: RunConfig | None
    problems: list[Problem]
    notices: list[str]
    source: str
    tree: Tree
    """The keys that were given and have fields, as they were written."""


def load_config(
    preset: str | Path | None,
    overrides: Overrides = (),
    config: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Return the configuration of a preset with changes; see `resolve_config`.

    Raises:
        ConfigError: it cannot be run; the message lists every problem.
    """
    return resolve_config(preset, overrides, config).config


def resolve_config(
    preset: str | Path | None,
    overrides: Overrides = (),
    config: Mapping[str, Any] | None = None,
) -> ResolvedConfig:
    """Merge preset, tree and overrides (later ones win) and check the result.

    Args:
        preset: name of a file in deployments/runs, or path of a YAML file; None: only `config`.
        overrides: strings in Hydra's syntax (`a.b=c`), or dotted keys with their values.
        config: partial tree laid over the preset.

    Raises:
        ConfigError: it cannot be run; the message lists every problem.
        UnsupportedVerlKeyError: every problem is a key of verl's that is not there yet.
    """
    found = examine(preset, overrides, config)
    if found.config is None or found.problems:
        unsupported = all(problem.is_unsupported for problem in found.problems)
        kind = UnsupportedVerlKeyError if unsupported else ConfigError
        raise kind(report(found.problems, found.source))
    return ResolvedConfig(config=found.config, notices=found.notices, source=found.source)


def examine(
    preset: str | Path | None,
    overrides: Overrides = (),
    config: Mapping[str, Any] | None = None,
) -> Examination:
    """Do the work of `resolve_config`, and return the problems instead of raising them.

    Raises:
        ConfigError: the preset cannot be read at all.
    """
    source, tree = read_preset(preset)
    return examine_tree(source, merge(tree, config or {}), overrides)


def examine_tree(source: str, tree: Tree, overrides: Overrides) -> Examination:
    """Lay overrides over a raw tree and check the result.

    Args:
        source: Where the tree came from, for messages.
        tree: Sections and keys as they were written.
        overrides: As for `resolve_config`.
    """
    changes, problems = parse_overrides(overrides) if overrides else ([], [])
    if overrides:
        count = len(changes) + len(problems)
        source += f" with {count} override{'' if count == 1 else 's'}"
    tree, misplaced = apply_overrides(tree, changes)
    tree, of_keys, notices = classify(tree)
    checked, of_values = validate_tree(tree)
    return Examination(
        config=checked,
        problems=[*problems, *misplaced, *of_keys, *of_values],
        notices=notices if checked is None else notices + idle_keys(tree, checked),
        source=source,
        tree=tree,
    )


def apply_overrides(tree: Tree, changes: list[Override]) -> tuple[Tree, list[Problem]]:
    """Return `tree` with the changes made, and the problems of those that name no key."""
    problems: list[Problem] = []
    for change in changes:
        value: Any = change.value
        if change.is_removal and not is_known(change.path):
            problems.append(unknown_key(f"~{change.path}", None, has_value=False))
        elif change.is_removal and value is not None and get(tree, change.path) != value:
            problems.append(_not_what_is_there(change, get(tree, change.path)))
        elif change.is_removal:
            tree = remove(tree, change.path)
        elif change.path in section_paths() and not isinstance(value, Mapping):
            problems += not_a_section(change.path, value)
        else:
            tree = put(tree, change.path, value)
    return tree, problems


def _not_what_is_there(change: Override, found: Any) -> Problem:
    """Return the problem of `~key=value` where the key has another value, as Hydra has it."""
    return Problem(
        path=f"~{change.path}",
        value=change.value,
        reason=f"the key is {show(found)}",
        fix=f"write ~{change.path} to take it away whatever it is",
    )
