"""What `rollflow runs` prints: a line per run, and two runs side by side."""

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlcore.tracking.curves import read_metrics

STALL_STEPS = 10
"""A run that completes no step for so many median steps has stalled."""

CURVES = {
    "critic/score/mean": "reward",
    "val-aux/accuracy": "accuracy",
    "response_length/mean": "length",
}
POINTS = 8
"""Steps of a curve that are shown."""

Metrics = dict[int, dict[str, float]]


def listed(root: Path) -> Iterator[str]:
    """Yield a line about every run below `root`, oldest first."""
    records = [json.loads(file.read_text(encoding="utf-8")) for file in root.glob("*/run.json")]
    if not records:
        yield f"no runs in {root}"
        return
    width = max(len(record["run_id"]) for record in records)
    for record in sorted(records, key=_began):
        metrics = _metrics(root / record["run_id"])
        yield f"{record['run_id']:{width}}  {_outcome(record):10}  {_told(record, metrics)}"


def compared(first: Path, second: Path) -> Iterator[str]:
    """Yield what differs between two runs' configurations, and their curves side by side."""
    names = [folder.resolve().name for folder in (first, second)]
    width = max(24, *(len(name) for name in names))
    left, right = (_flat(_config(folder)) for folder in (first, second))
    different = [key for key in sorted(left | right) if left.get(key) != right.get(key)]
    yield f"{'':48}  {names[0]:>{width}}  {names[1]:>{width}}"
    for key in different:
        yield f"{key:48}  {_value(left, key):>{width}}  {_value(right, key):>{width}}"
    if not different:
        yield "the configurations are equal"
    curves = [_metrics(folder) for folder in (first, second)]
    for metric, name in CURVES.items():
        steps = sorted({step for run in curves for step in run if metric in run[step]})
        for step in _some(steps):
            values = [run.get(step, {}).get(metric) for run in curves]
            told = [f"{'' if value is None else f'{value:.4f}':>{width}}" for value in values]
            yield f"{f'{name}, step {step}':48}  {'  '.join(told)}"


def stall_after_s(metrics: Metrics) -> float | None:
    """Return 10 median steps in seconds: after so long without a step a run has stalled."""
    seconds = [values["timing_s/step"] for values in metrics.values() if "timing_s/step" in values]
    return STALL_STEPS * statistics.median(seconds) if seconds else None


def _told(record: dict[str, Any], metrics: Metrics) -> str:
    told = [f"attempt {len(record['attempts'])}", f"step {max(metrics, default=0)}"]
    scores = [v["val-aux/accuracy"] for v in metrics.values() if "val-aux/accuracy" in v]
    if scores:
        told.append(f"accuracy {scores[-1]:.3f}")
    stall_s = stall_after_s({step: v for step, v in metrics.items() if step > 0})
    if stall_s is not None:
        told.append(f"stalled after {stall_s:.0f} s without a step")
    began = _began(record)
    if began:
        told.append(time.strftime("%Y-%m-%d %H:%M", time.localtime(began)))
    return ", ".join(told)


def _outcome(record: dict[str, Any]) -> str:
    if not record["attempts"]:
        return "new"
    return str(record["attempts"][-1].get("outcome", "running"))


def _began(record: dict[str, Any]) -> float:
    return float(record["attempts"][0]["began"]) if record["attempts"] else 0.0


def _metrics(folder: Path) -> Metrics:
    file = folder / "metrics.jsonl"
    return read_metrics(file) if file.is_file() else {}


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        flat |= _flat(value, f"{path}.") if isinstance(value, dict) else {path: value}
    return flat


def _value(flat: dict[str, Any], key: str) -> str:
    return json.dumps(flat[key]) if key in flat else "-"


def _some(steps: list[int]) -> list[int]:
    """Return at most POINTS of the steps, evenly spread, the first and the last among them."""
    if len(steps) <= POINTS:
        return steps
    last = len(steps) - 1
    return [steps[round(i * last / (POINTS - 1))] for i in range(POINTS)]
