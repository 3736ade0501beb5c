"""When a replica counts as lost: its process is gone, it does not answer, or its engine hangs."""

from dataclasses import dataclass
from typing import Any

from rlcore.errors import ActorUnavailableError, TransientError


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthLimits:
    """How patient the watch over replicas is."""

    check_every_s: float = 2.0
    answer_s: float = 10.0
    """For an answer, which no work of the replica delays."""
    max_misses: int = 3
    """Checks in a row without an answer."""
    hang_s: float = 180.0
    """Without a step of the engine while requests run and nothing holds the gate."""
    start_s: float = 300.0
    """For a new replica to load its model."""
    max_restarts: int = 5
    """Failed starts in a row; then the run cannot go on."""
    backoff_s: float = 1.0
    """Before the second start; doubles."""


class ReplicaHealth:
    """Judges one replica by its answers to `health`.

    Example:
        >>> health = ReplicaHealth("replica-0", HealthLimits())
        >>> health.answered(replica.health())
        ''
    """

    def __init__(self, name: str, limits: HealthLimits) -> None:
        self._name = name
        self._limits = limits
        self._misses = 0

    def answered(self, report: dict[str, Any]) -> str:
        """Take an answer; return why the replica is lost, empty if it is not."""
        self._misses = 0
        if report["state"] == "dead":
            return f"{self._name} is dead: {report['error'] or 'closed'}"
        is_working = report["state"] == "ready" and report["loading_version"] is None
        idle_s = report["last_step_age_s"]
        if is_working and report["in_flight"] and idle_s > self._limits.hang_s:
            return (
                f"{self._name} hangs: {report['in_flight']} requests run and the last step was "
                f"{idle_s:.0f} s ago"
            )
        return ""

    def missed(self, error: TransientError) -> str:
        """Take the lack of an answer; return why the replica is lost, empty if it may be not."""
        if isinstance(error, ActorUnavailableError):
            return f"{self._name} died: {error}"
        self._misses += 1
        if self._misses < self._limits.max_misses:
            return ""
        return f"{self._name} did not answer {self._misses} times: {error}"
