"""What a process that runs user code and its parent tell each other: pickles after their length."""

import struct
from dataclasses import dataclass, field
from typing import Any, Literal

from rlcore.config import RunConfig

LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The first message: what the process is for."""

    factory: str
    """`module:function`; called with the configuration and `arguments`, returns what is called with
    each task."""
    config: RunConfig
    max_memory_mb: int
    """What it may add to its memory at the start."""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of the factory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """The answer to the set-up and to each task."""

    status: Literal["ready", "done", "refused", "bad_result", "unavailable", "raised"]
    value: Any = None
    message: str = ""
    rss_mb: int = 0
    """Memory in use after the call."""
