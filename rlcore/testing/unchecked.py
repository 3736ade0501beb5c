"""Configurations that no rule was asked about: for tests of rules and of coming features."""

from collections.abc import Mapping
from typing import Any, TypeVar

from rlcore.config import RunConfig, load_config
from rlcore.config.base import Section
from rlcore.config.tree import Tree, put, section_of

S = TypeVar("S", bound=Section)


def unchecked_config(values: Mapping[str, Any], preset: str = "grpo-tiny") -> RunConfig:
    """Return a preset with keys set, whatever rules and markers say of them.

    Args:
        values: Dotted key to value, already of the key's own type.
        preset: What lies beneath.
    """
    tree: Tree = load_config(preset).model_dump(mode="python")
    for path, value in values.items():
        tree = put(tree, path, value)
    return _construct(RunConfig, tree)


def _construct(section: type[S], tree: Tree) -> S:
    fields: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        value = tree[field.alias or name]
        inner = section_of(field)
        fields[name] = value if inner is None else _construct(inner, value)
    return section.model_construct(**fields)
