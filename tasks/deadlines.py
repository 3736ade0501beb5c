"""How long a phase may take: the configured seconds, or a multiple of what it took before."""

import statistics
from collections import defaultdict, deque

from rlcore.config import RunConfig

HISTORY = 20
FACTOR = 10.0


class PhaseDeadlines:
    """deadlines.<phase> if set; else max(minimum, 10 x the median of the last 20).

    The first call of a phase has `deadlines.first_call`.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config.deadlines
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=HISTORY))

    def record(self, phase: str, seconds: float) -> None:
        """Remember how long a phase took."""
        self._seconds[phase].append(seconds)

    def for_phase(self, phase: str) -> float:
        """Return the seconds that the next call of a phase may take."""
        configured = self._config.for_phase(phase)
        if configured is not None:
            return float(configured)
        history = self._seconds[phase]
        if not history:
            return float(self._config.first_call)
        return max(float(self._config.minimum), FACTOR * statistics.median(history))
