"""Reward and accuracy curves as PNG, from metrics.jsonl."""

import json
from pathlib import Path


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Return step -> metrics; of a step logged by several attempts the last values count.

    A last line without an end is left out: who wrote it died.
    """
    by_step: dict[int, dict[str, float]] = {}
    whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
    for line in whole.splitlines():
        record = json.loads(line)
        by_step.setdefault(record.pop("step"), {}).update(record)
    return dict(sorted(by_step.items()))


def validation_scores(path: Path, *, up_to_step: int) -> dict[str, float]:
    """Return step (as text, as in JSON) -> held-out accuracy of every validation so far."""
    if not path.is_file():
        return {}
    return {
        str(step): metrics["val-aux/accuracy"]
        for step, metrics in read_metrics(path).items()
        if step <= up_to_step and "val-aux/accuracy" in metrics
    }


def lacks_step(path: Path, step: int) -> bool:
    """Say whether metrics are written to `path`, but none of `step`."""
    return path.is_file() and step not in read_metrics(path)


def draw_curves(metrics_path: Path, folder: Path) -> list[Path]:
    """Write reward.png and accuracy.png to `folder`; return their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_step = read_metrics(metrics_path)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for file_name, title, names in (
        ("reward.png", "training reward (mean over the batch)", ["critic/score/mean"]),
        ("accuracy.png", "held-out accuracy (greedy)", ["val-aux/accuracy"]),
    ):
        figure, axes = pyplot.subplots(figsize=(7, 4), dpi=110)
        for name in names:
            points = [(step, values[name]) for step, values in by_step.items() if name in values]
            axes.plot([p[0] for p in points], [p[1] for p in points], marker="o", markersize=3)
        if file_name == "accuracy.png":
            _draw_error_bars(axes, by_step)
        axes.set(xlabel="step", ylabel=title, ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        figure.tight_layout()
        figure.savefig(folder / file_name)
        pyplot.close(figure)
        written.append(folder / file_name)
    return written


def _draw_error_bars(axes: object, by_step: dict[int, dict[str, float]]) -> None:
    points = [
        (step, v["val-aux/accuracy"], v["val-aux/accuracy_stderr"])
        for step, v in by_step.items()
        if "val-aux/accuracy" in v
    ]
    if points:
        steps, values, errors = zip(*points, strict=True)
        axes.errorbar(steps, values, yerr=errors, fmt="none", capsize=3)  # type: ignore[attr-defined]
