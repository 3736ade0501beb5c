"""What a scoring process and its parent tell each other: pickles, each after its length."""

import struct
from dataclasses import dataclass
from typing import Literal

from rlcore.reward.function import Reward

LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """What the process answers to its set-up and to each task."""

    status: Literal["ready", "scored", "refused", "bad_result", "raised"]
    reward: Reward | None = None
    message: str = ""
    rss_mb: int = 0
    """Memory in use after the call."""
