"""How old the tokens of a batch are (verl's names)."""

from collections.abc import Sequence

from rlcore.buffer.policy import num_updates
from rlcore.types import SampledBatch


def off_policy_metrics(
    batch: SampledBatch, trainer_version: int, skipped_versions: Sequence[int] = ()
) -> dict[str, float]:
    """Return spans and staleness of the trajectories, in weight updates.

    `trajectory_spans` counts the versions from the oldest to the newest that sampled a trajectory;
    `trajectory_staleness` the updates from the newest of its tokens to the trainer's weights,
    `trajectory_staleness_worst` from the oldest. Trajectories without a sampled token are left out.

    Args:
        batch: With `min_global_steps` and `max_global_steps` in its tags.
        trainer_version: Of the weights at the start of the step.
        skipped_versions: Numbers that name no weights of this run's line, ascending.
    """
    spans = [
        (tag["min_global_steps"], tag["max_global_steps"])
        for tag in batch.tags
        if tag.get("min_global_steps", -1) >= 0
    ]
    if not spans:
        return {}

    def updates(older: int, newer: int) -> int:
        return num_updates(older, newer, skipped_versions)

    values = {
        "trajectory_spans": [float(updates(oldest, newest) + 1) for oldest, newest in spans],
        "trajectory_staleness": [float(updates(new, trainer_version)) for _, new in spans],
        "trajectory_staleness_worst": [float(updates(old, trainer_version)) for old, _ in spans],
    }
    return {
        f"training/off_policy/{name}/{kind}": value
        for name, found in values.items()
        for kind, value in (
            ("mean", sum(found) / len(found)),
            ("max", max(found)),
            ("min", min(found)),
        )
    }
