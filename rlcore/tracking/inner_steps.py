"""One report of a step whose inner steps report each for itself."""

from collections.abc import Mapping

SUMMED = frozenset(
    {
        "failed_groups",
        "failed_sessions",
        "log_prob_seconds",
        "nonfinite_steps",
        "num_prompts",
        "num_trajectories",
        "optimizer_steps",
        "refilled_prompts",
        "returned_prompts",
        "sample_wait_s",
        "settled_sessions",
        "total_num_tokens",
        "trained_trajectories",
        "update_seconds",
    }
)
"""Last part of the names of what is counted; everything below `timing_s` is added up, too."""


def add_inner_step(
    so_far: Mapping[str, float], new: Mapping[str, float], inner_step: int
) -> dict[str, float]:
    """Return the metrics of a step after one more inner step.

    Counts and seconds are added up, `max` and `min` are those of all, the rest are means.

    Args:
        so_far: Of the step, with those of the inner steps before.
        new: Of one phase of an inner step.
        inner_step: Its number, from 0.
    """
    merged = dict(so_far)
    for name, value in new.items():
        before = so_far.get(name)
        merged[name] = (
            value if inner_step == 0 or before is None else _both(name, before, value, inner_step)
        )
    return merged


def _both(name: str, before: float, value: float, inner_step: int) -> float:
    last = name.rpartition("/")[2]
    if name.startswith("timing_s/") or last in SUMMED:
        return before + value
    if last == "max" or last.endswith("_max"):
        return max(before, value)
    if last == "min" or last.endswith("_min"):
        return min(before, value)
    return before + (value - before) / (inner_step + 1)
