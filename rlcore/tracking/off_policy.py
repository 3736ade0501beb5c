"""How old the tokens of a batch are (verl's names)."""

from rlcore.types import SampledBatch


def off_policy_metrics(batch: SampledBatch, trainer_version: int) -> dict[str, float]:
    """Return spans and staleness of the trajectories, in weight versions.

    `trajectory_spans` counts the versions that sampled a trajectory, newest - oldest + 1;
    `trajectory_staleness` is the trainer's version less the newest of its tokens,
    `trajectory_staleness_worst` less the oldest. Trajectories without a sampled token are left out.

    Args:
        batch: With `min_global_steps` and `max_global_steps` in its tags.
        trainer_version: Of the weights at the start of the step.
    """
    spans = [
        (tag["min_global_steps"], tag["max_global_steps"])
        for tag in batch.tags
        if tag.get("min_global_steps", -1) >= 0
    ]
    if not spans:
        return {}
    values = {
        "trajectory_spans": [float(newest - oldest + 1) for oldest, newest in spans],
        "trajectory_staleness": [float(trainer_version - newest) for _, newest in spans],
        "trajectory_staleness_worst": [float(trainer_version - oldest) for oldest, _ in spans],
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
