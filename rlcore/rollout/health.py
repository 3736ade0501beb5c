"""When a replica counts as lost, and when it helps no more to replace those that are.

Lost is one whose process is gone, that does not answer, or whose engine hangs. A request that
breaks the engine breaks the next one, too, on whatever replica it goes on.
"""

from collections import deque
from collections.abc import Collection
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
    max_losses_of_a_request: int = 3
    """Replicas that may be lost while one and the same request runs on them; the last is not
    replaced, and the run cannot go on."""
    max_short_lives: int = 5
    """Losses of one replica in a row, each within `healthy_s` of its last start; likewise."""
    healthy_s: float = 60.0
    """Of service, after which earlier losses of a replica count no more."""


MAX_NAMED_REQUESTS = 3
"""In messages."""

MAX_LOSSES_KEPT = 64
"""Of all replicas of a run."""


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
        self.requests: list[str] = []
        """What it computed at its last answer."""

    def answered(self, report: dict[str, Any]) -> str:
        """Take an answer; return why the replica is lost, empty if it is not."""
        self._misses = 0
        self.requests = report["requests"]
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


class Losses:
    """Remembers the losses of a run's replicas, to see what breaks each that it meets.

    Example:
        >>> losses = Losses(HealthLimits(max_losses_of_a_request=2))
        >>> losses.add("replica-0", "it died", ["train/0/17-0-0"], served_s=90.0)
        ''
        >>> losses.add("replica-1", "it died", ["train/0/17-0-1"], served_s=90.0)
        'replica-0, replica-1 were lost while request train/0/17-0 ran; the last: it died'
    """

    def __init__(self, limits: HealthLimits) -> None:
        self._limits = limits
        self._lost: deque[tuple[str, frozenset[str]]] = deque(maxlen=MAX_LOSSES_KEPT)
        self._short_lives: dict[str, int] = {}

    def add(self, name: str, reason: str, part_ids: Collection[str], served_s: float) -> str:
        """Record a loss.

        Args:
            name: Of the replica.
            reason: Why it is lost.
            part_ids: What it computed, as `LLMServerClient` names the parts of requests.
            served_s: Seconds since it was brought in.

        Returns:
            Why a new one would be lost like those before, empty if that is not known.
        """
        # A part that goes on elsewhere has the next number.
        requests = frozenset(part_id.rpartition("-")[0] for part_id in part_ids)
        self._lost.append((name, requests))
        limits = self._limits
        is_short = served_s < limits.healthy_s
        self._short_lives[name] = self._short_lives.get(name, 0) + 1 if is_short else 0
        hit = {r: [n for n, ran in self._lost if r in ran] for r in sorted(requests)}
        guilty = {
            r: names for r, names in hit.items() if len(names) >= limits.max_losses_of_a_request
        }
        if guilty:
            named = list(guilty)[:MAX_NAMED_REQUESTS]
            more = len(guilty) - len(named)
            return (
                f"{', '.join(guilty[named[0]])} were lost while request {', '.join(named)}"
                f"{f' and {more} more' if more else ''} ran; the last: {reason}"
            )
        if self._short_lives[name] >= limits.max_short_lives:
            ran = ", ".join(sorted(requests)[:MAX_NAMED_REQUESTS]) or "none that is known"
            return (
                f"{name} was lost {self._short_lives[name]} times in a row within "
                f"{limits.healthy_s:g} s of its start; requests that ran: {ran}; the last: {reason}"
            )
        return ""
