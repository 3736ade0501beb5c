"""Metrics of a sampled batch from its tags alone (verl's names)."""

from collections.abc import Sequence

from rlcore.errors import DataError
from rlcore.types import SampledBatch


def batch_metrics(batch: SampledBatch) -> dict[str, float]:
    """Return reward, accuracy, length and turn metrics.

    Raises:
        DataError: a trajectory has no reward.
    """
    unscored = [
        key for key, tag in zip(batch.keys, batch.tags, strict=True) if tag["reward"] is None
    ]
    if unscored:
        raise DataError(
            f"rows without a reward: {', '.join(unscored[:5])} ({len(unscored)} in all)"
        )
    rewards = [float(tag["reward"]) for tag in batch.tags]
    metrics = _mean_max_min("critic/score", rewards) | _mean_max_min("critic/rewards", rewards)
    accuracies = [
        float(tag["reward_extra"]["acc"]) for tag in batch.tags if "acc" in tag["reward_extra"]
    ]
    if accuracies:
        metrics["critic/acc/mean"] = sum(accuracies) / len(accuracies)
    metrics |= _reward_parts(batch)
    turns = [float(tag["num_turns"]) for tag in batch.tags if "num_turns" in tag]
    if turns:
        metrics |= _mean_max_min("num_turns", turns)
    for name in ("prompt", "response"):
        metrics |= _mean_max_min(f"{name}_length", [float(t[f"{name}_len"]) for t in batch.tags])
    metrics["perf/total_num_tokens"] = float(sum(tag["seq_len"] for tag in batch.tags))
    return metrics


def _reward_parts(batch: SampledBatch) -> dict[str, float]:
    """Return the mean of each number that reward functions returned beside the score."""
    parts: dict[str, list[float]] = {}
    for tag in batch.tags:
        for name, value in tag["reward_extra"].items():
            if name != "acc" and isinstance(value, int | float):
                parts.setdefault(name, []).append(float(value))
    return {f"reward/{name}/mean": sum(values) / len(values) for name, values in parts.items()}


def _mean_max_min(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        f"{name}/mean": sum(values) / len(values),
        f"{name}/max": max(values),
        f"{name}/min": min(values),
    }
