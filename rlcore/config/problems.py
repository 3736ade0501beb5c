"""One thing that is wrong with a configuration, and how a list of them reads."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

CROSS_FIELD = "cross_field"
"""Type of the pydantic error that carries the problems of rules between keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Why a key cannot be taken as it is."""

    path: str
    """Dotted key, or the override as it was typed where it cannot be read."""
    reason: str
    fix: str
    value: Any = None
    has_value: bool = True
    """False where the key is missing or the reason names the values."""
    is_unsupported: bool = False
    """A real key of verl's that asks for what rollflow does not do."""
    is_idle: bool = False
    """The key has no effect beside the others; verl takes such a key in silence."""
    involves: tuple[str, ...] = ()
    """Dotted keys besides `path` whose values are part of the reason."""

    def __str__(self) -> str:
        value = f"={show(self.value)}" if self.has_value else ""
        return f"{self.path}{value}: {self.reason}; {self.fix}"


def show(value: Any) -> str:
    """Return `value` as one would write it in an override."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(show, value)) + "]"  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{show(item)}" for key, item in value.items()) + "}"  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return str(value)


def report(problems: Sequence[Problem], source: str) -> str:
    """Return the message that lists all problems found in `source`."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"{count} in the configuration ({source}):"]
    for problem in problems:
        value = f" = {show(problem.value)}" if problem.has_value else ""
        lines += [f"  {problem.path}{value}", f"    {problem.reason}", f"    fix: {problem.fix}"]
    return "\n".join(lines)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known dotted key that `name` most likely means, or None.

    A key with the right last part in another place (`train_batch_size`, `actor.optim.lr`) comes
    before one that is merely spelt alike.
    """
    keys = list(known)
    ends = [key for key in keys if key.endswith(f".{name}")]
    if len(ends) == 1:
        return ends[0]
    alike = difflib.get_close_matches(name, keys, n=1, cutoff=0.75)
    if alike:
        return alike[0]
    last = name.rsplit(".", 1)[-1]
    same_last = [key for key in keys if key.rsplit(".", 1)[-1] == last]
    candidates = difflib.get_close_matches(name, same_last, n=1, cutoff=0.0)
    return candidates[0] if candidates else None
