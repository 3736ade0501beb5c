"""Nested dicts and dotted keys: walking the model, merging, setting, listing leaves."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, cast, get_args

from pydantic.fields import FieldInfo

from rlcore.config.base import Section, Unit
from rlcore.config.pending import Hint, Marker, NotYet
from rlcore.config.run import RunConfig

Tree = dict[str, Any]
_ATTRIBUTES = {"validate": "validate_"}
"""Keys whose attribute has another name, since pydantic has a method of theirs."""


@cache
def all_fields() -> dict[str, FieldInfo]:
    """Return the field of every dotted key that `RunConfig` has, in the order of the tree."""
    return {path: field for path, field, _ in _leaves_of(RunConfig, "", None)}


@cache
def markers() -> dict[str, Marker]:
    """Return the marker of every dotted key that is not read (yet): its own, or its section's."""
    return {path: marker for path, _, marker in _leaves_of(RunConfig, "", None) if marker}


@cache
def honoured_fields() -> dict[str, FieldInfo]:
    """Return the field of every dotted key that is read."""
    return {path: field for path, field in all_fields().items() if path not in markers()}


def _leaves_of(
    section: type[Section], prefix: str, inherited: Marker | None
) -> Iterator[tuple[str, FieldInfo, Marker | None]]:
    for name, field in section.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        marker = next((m for m in field.metadata if isinstance(m, NotYet | Hint)), inherited)
        inner = section_of(field)
        if inner is None:
            yield path, field, marker
        else:
            yield from _leaves_of(inner, f"{path}.", marker)


def value_at(config: RunConfig, path: str) -> Any:
    """Return the value that a configuration has at a dotted key."""
    found: Any = config
    for part in path.split("."):
        found = getattr(found, _ATTRIBUTES.get(part, part))
    return found


def default_of(path: str) -> Any:
    """Return the default of a dotted key that has one."""
    return all_fields()[path].get_default(call_default_factory=True)


def unit_of(path: str) -> str | None:
    """Return the unit of the number at a dotted key; None where it holds no number."""
    return _unit_in(all_fields()[path])


def _unit_in(field: FieldInfo) -> str | None:
    found = [note.name for note in field.metadata if isinstance(note, Unit)]
    return found[0] if found else _unit_of_type(field.annotation)


def _unit_of_type(kind: Any) -> str | None:
    # Metadata of Annotated types sits inside unions and tuples.
    for note in getattr(kind, "__metadata__", ()):
        if isinstance(note, Unit):
            return note.name
    inner = [_unit_of_type(part) for part in get_args(kind) if not isinstance(part, str)]
    return next((unit for unit in inner if unit), None)


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section that `field` holds, or None where it holds a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


@cache
def section_paths() -> frozenset[str]:
    """Return the dotted key of every section."""
    parts = [path.split(".") for path in all_fields()]
    return frozenset(".".join(p[:depth]) for p in parts for depth in range(1, len(p)))


def merge(base: Tree, over: Mapping[str, Any]) -> Tree:
    """Return `base` with `over` laid on top; dicts are merged, everything else replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, Mapping):
            merged[key] = merge(cast(Tree, below), cast("Mapping[str, Any]", value))
        else:
            merged[key] = value
    return merged


def put(tree: Tree, path: str, value: Any) -> Tree:
    """Return `tree` with the dotted key `path` set to `value`; a dict is merged."""
    nested: Any = value
    for part in reversed(path.split(".")):
        nested = {part: nested}
    return merge(tree, nested)


def remove(tree: Tree, path: str) -> Tree:
    """Return `tree` without the dotted key `path`; unchanged where it has none."""
    first, _, rest = path.partition(".")
    if first not in tree:
        return tree
    if not rest:
        return {key: value for key, value in tree.items() if key != first}
    below = tree[first]
    return {**tree, first: remove(cast(Tree, below), rest)} if isinstance(below, dict) else tree


def get(tree: Tree, path: str) -> Any:
    """Return the value at the dotted key `path`, or None where there is none."""
    found: Any = tree
    for part in path.split("."):
        if not isinstance(found, dict) or part not in found:
            return None
        found = cast(Tree, found)[part]
    return found


def leaves(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every dotted key of `tree` with its value.

    A dict is a value where the model says so (`data.apply_chat_template_kwargs`), or when empty
    under a key that is no section.
    """
    for key, value in tree.items():
        path = f"{prefix}{key}"
        is_value = path in all_fields() or not isinstance(value, dict)
        if not is_value and (value or path in section_paths()):
            yield from leaves(cast(Tree, value), f"{path}.")
        else:
            yield path, value
