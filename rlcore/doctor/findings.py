"""One thing that was looked at."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was found; `error`: no run can start, `warning`: it may fail, be slow or be unsafe."""

    level: Level
    subject: str
    message: str
    fix: str = ""
    """What to do; empty where all is well."""

    def __str__(self) -> str:
        fix = f"\n{'':9}fix: {self.fix}" if self.fix else ""
        return f"{self.level:8} {self.subject}: {self.message}{fix}"


def gibibytes(size: float) -> str:
    """Return a size for a person."""
    return f"{size / 1024**3:.1f} GiB"
