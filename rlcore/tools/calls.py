"""A model's wish to call a tool."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """What the model wants to be called."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class InvalidCall:
    """A block that was meant as a call and cannot be read."""

    reason: str
