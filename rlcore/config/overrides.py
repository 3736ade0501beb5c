"""Overrides as one types them for verl: `a.b=c`, `+a.b=c`, `~a.b`, lists, dicts, quotes.

The grammar is Hydra's own parser, used in this file only. `key=`, `+key=` and `++key=` mean the
same here: the tree is closed, and a key either exists or is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override as HydraOverride
from hydra.errors import HydraException

from rlcore.config.problems import Problem, report
from rlcore.errors import ConfigError

Overrides = Sequence[str] | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """One key to set or to take away."""

    path: str
    value: Any = None
    is_removal: bool = False
    """`~key`: back to the default."""


def parse_overrides(overrides: Overrides) -> tuple[list[Override], list[Problem]]:
    """Return the overrides that can be read, in their order, and the problems of the others.

    Args:
        overrides: strings in Hydra's syntax, or dotted keys with their values.
    """
    if isinstance(overrides, Mapping):
        return [Override(path=path, value=value) for path, value in overrides.items()], []
    parser = OverridesParser.create()
    parsed: list[Override] = []
    problems: list[Problem] = []
    for text in [overrides] if isinstance(overrides, str) else overrides:
        result = _parse(parser, text)
        if isinstance(result, Problem):
            problems.append(result)
        else:
            parsed.append(result)
    return parsed, problems


def overrides_as_dict(overrides: Overrides) -> dict[str, Any]:
    """Return overrides as dotted key to value, for a flow's parameters; later ones win.

    Raises:
        ConfigError: some cannot be read, or take a key away, which a dict cannot say.
    """
    parsed, problems = parse_overrides(overrides)
    problems += [
        _unreadable(
            f"~{override.path}", "a key cannot be taken away here", "set the value you want"
        )
        for override in parsed
        if override.is_removal
    ]
    if problems:
        raise ConfigError(report(problems, "overrides"))
    values: dict[str, Any] = {}
    for override in parsed:
        values.pop(override.path, None)  # the order of the last mention counts
        values[override.path] = override.value
    return values


def _parse(parser: OverridesParser, text: str) -> Override | Problem:
    try:
        override = parser.parse_override(text)
    except HydraException as error:
        return _unreadable(
            text,
            f"it cannot be read: {str(error).splitlines()[0]}",
            "write key=value; quote values that hold spaces, commas or brackets: 'key=\"a, b\"'",
        )
    return _refused_form(text, override) or Override(
        path=override.key_or_group, value=override.value(), is_removal=override.is_delete()
    )


def _refused_form(text: str, override: HydraOverride) -> Problem | None:
    if override.is_sweep_override():
        return _unreadable(
            text, "several values for one key (a sweep) are not run", "write a list as key=[a,b]"
        )
    if override.package is not None:
        return _unreadable(text, "there are no config groups", "write key=value")
    if not override.is_delete() and "${" in str(override.value()):
        return _unreadable(
            text, "interpolation (${...}) is not evaluated", "write the value itself"
        )
    return None


def _unreadable(text: str, reason: str, fix: str) -> Problem:
    return Problem(path=text, has_value=False, reason=reason, fix=fix)
