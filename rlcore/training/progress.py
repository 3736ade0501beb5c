"""Which optimizer steps were applied, and what they reported: the memory behind "exactly once"."""

from typing import Any

from rlcore.errors import FencedError
from rlcore.fencing import KEPT_STEPS
from rlcore.types import CallKey

Place = tuple[int, int]
"""(global_step, inner_step)."""


class Progress:
    """Counters of one training worker; all of them are in its checkpoint."""

    def __init__(self) -> None:
        self.num_inner_steps = 0
        """Finished inner steps: where the learning-rate schedule stands."""
        self.num_nonfinite = 0
        """Skipped optimizer steps in a row."""
        self._applied: dict[Place, list[dict[str, float]]] = {}
        self._finished: dict[Place, dict[str, float]] = {}

    @property
    def last_finished(self) -> Place | None:
        """The newest inner step that is complete."""
        return max(self._finished, default=None)

    def has_begun(self, key: CallKey) -> bool:
        """Whether an optimizer step of this inner step (or a later one) was applied."""
        newest = max(self._applied, default=(0, -1))
        return _place(key) <= newest

    def finished(self, key: CallKey) -> dict[str, float] | None:
        """Return the stored metrics if this inner step is complete.

        Raises:
            FencedError: it is older than what is remembered or than an inner step that has begun.
        """
        place = _place(key)
        if place in self._finished:
            return dict(self._finished[place])
        newest = max(self._applied, default=(0, -1))
        if place < newest:
            raise FencedError(f"{key} was refused: {newest[0]}.{newest[1]} has been applied")
        return None

    def num_applied(self, key: CallKey) -> int:
        """Return how many optimizer steps of this inner step were applied or skipped."""
        return len(self._applied.get(_place(key), []))

    def applied(self, key: CallKey) -> list[dict[str, float]]:
        """Return the metrics of those, in order."""
        return self._applied[_place(key)]

    def apply(self, key: CallKey, metrics: dict[str, float], *, is_skipped: bool) -> None:
        """Record one optimizer step."""
        self.num_nonfinite = self.num_nonfinite + 1 if is_skipped else 0
        # What a skipped step has summed up so far is no metric of a step.
        kept = {} if is_skipped else metrics
        counted = {"optimizer_steps": 1.0 - is_skipped, "nonfinite_steps": float(is_skipped)}
        self._applied.setdefault(_place(key), []).append({**kept, **counted})

    def finish(self, key: CallKey, metrics: dict[str, float]) -> dict[str, float]:
        """Store the metrics of a complete inner step and return them."""
        self._finished[_place(key)] = dict(metrics)
        self.num_inner_steps += 1
        oldest = key.global_step - KEPT_STEPS
        for kept in (self._applied, self._finished):
            for place in [place for place in kept if place[0] <= oldest]:
                del kept[place]
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return plain values that `load_state_dict` takes."""
        return {
            "num_inner_steps": self.num_inner_steps,
            "num_nonfinite": self.num_nonfinite,
            "applied": [[list(place), steps] for place, steps in self._applied.items()],
            "finished": [[list(place), metrics] for place, metrics in self._finished.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace everything by a saved state."""
        self.num_inner_steps = state["num_inner_steps"]
        self.num_nonfinite = state["num_nonfinite"]
        self._applied = {(p[0], p[1]): steps for p, steps in state["applied"]}
        self._finished = {(p[0], p[1]): metrics for p, metrics in state["finished"]}


def _place(key: CallKey) -> Place:
    return key.global_step, key.inner_step
