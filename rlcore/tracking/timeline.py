"""What generated and what trained when, of one run or several below each other, as a PNG.

Read from what every run leaves: the ledger's journals say when a prompt was claimed and settled,
metrics.jsonl when a step ended and how long its phases took. A phase that a step runs several times
(`parameter_sync_step`) is drawn once, as long as all of them.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.buffer.journal import read_journal
from rlcore.errors import CheckpointError

TIMING = "timing_s/"
NOT_PHASES = frozenset({"step", "on_step_begin", "on_sample_begin"})
"""Entries of `timing_s` that hold other entries, or begin a step and do nothing by themselves."""
WAITING = "sample_batch"
WEIGHTS = frozenset({"on_step_end", "update_weights", "on_sample_end", "sleep_replicas"})
"""Phases and hooks that stop, move or start the engines."""
UPDATE = frozenset({"update_actor", "update_critic"})
FORWARD = frozenset(
    {"compute_reward", "compute_old_log_probs", "compute_ref_log_probs",
     "compute_teacher_log_probs", "compute_values", "compute_advantage"}
)  # fmt: skip
COLOURS = {
    "wait": "#d9d9d9",
    "forward": "#9ecae1",
    "update": "#3182bd",
    "weights": "#de2d26",
    "other": "#fdae6b",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that lasted; times in seconds since 1970."""

    name: str
    """A prompt's uid, or a phase."""
    step: int
    """Dispatch step of a prompt, training step of a phase."""
    begin: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Steps of a run, in whichever of its attempts."""

    title: str
    prompts: tuple[Span, ...]
    """From the last claim to the settling, in order of claims; validation left out."""
    phases: tuple[Span, ...]
    """In order."""


def read_timeline(folder: Path, *, first: int, last: int) -> Timeline:
    """Return what steps `first` to `last` of the run in `folder` did, and generation meanwhile.

    Raises:
        CheckpointError: the run has no such steps, or was made before times were written.
    """
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    phases = tuple(_phases(folder / "metrics.jsonl", first, last))
    if not phases:
        raise CheckpointError(
            f"{folder}: metrics.jsonl has no steps {first} to {last} with times (trainer.logger "
            "has to contain `file`)"
        )
    begin, end = phases[0].begin, phases[-1].end
    attempts = range(1, len(record["attempts"]) + 1)
    journals = [folder / "journal" / f"attempt-{number}.jsonl" for number in attempts]
    prompts = sorted(
        (span for span in _prompts(journals) if span.end > begin and span.begin < end),
        key=lambda span: span.begin,
    )
    mode = config["trainer"]["v1"]["trainer_mode"]
    return Timeline(title=f"{mode} ({record['run_id']})", prompts=tuple(prompts), phases=phases)


def draw_timeline(timelines: Sequence[Timeline], path: Path) -> None:
    """Write one picture to `path`, the runs below each other on one scale of seconds.

    Above, a bar per prompt with its group of responses, coloured by the step it was fed for; below,
    the phases of training.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, rows = pyplot.subplots(
        len(timelines), figsize=(11, 2.6 * len(timelines)), dpi=110, sharex=True, squeeze=False
    )
    for timeline, axes in zip(timelines, rows[:, 0], strict=True):
        _draw(axes, timeline)
    rows[-1, 0].set_xlabel("seconds")
    labels = {"wait": "waits for responses", "forward": "rewards, log-probs, advantages",
              "update": "optimizer step", "weights": "engines: stop, new weights, go",
              "other": "feeding, validation, checkpoints"}  # fmt: skip
    figure.legend(
        handles=[Patch(color=COLOURS[kind], label=label) for kind, label in labels.items()],
        loc="lower center", ncols=len(labels), frameon=False, fontsize=8,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path)
    pyplot.close(figure)


def _draw(axes: Any, timeline: Timeline) -> None:
    origin = timeline.phases[0].begin
    lanes = _lanes(timeline.prompts)
    steps = sorted({span.step for span in timeline.prompts})
    for span, lane in zip(timeline.prompts, lanes, strict=True):
        colour = f"C{(steps.index(span.step) + 2) % 10}"
        axes.broken_barh([_bar(span, origin)], (lane + 1.5, 0.9), facecolors=colour, linewidth=0)
    for span in timeline.phases:
        axes.broken_barh([_bar(span, origin)], (0, 1), facecolors=COLOURS[_kind(span.name)])
    for step in sorted({span.step for span in timeline.phases}):
        end = max(span.end for span in timeline.phases if span.step == step) - origin
        axes.axvline(end, color="black", linewidth=0.6, linestyle=":")
    top = 1.5 + max(lanes, default=0) + 1
    axes.set(
        xlim=(0, timeline.phases[-1].end - origin), ylim=(-0.2, top),
        yticks=[0.5, (top + 1.5) / 2], yticklabels=["training", "generation"],
    )  # fmt: skip
    axes.set_title(timeline.title, fontsize=9, loc="left")


def _bar(span: Span, origin: float) -> tuple[float, float]:
    return span.begin - origin, span.end - span.begin


def _kind(phase: str) -> str:
    if phase == WAITING:
        return "wait"
    if phase in WEIGHTS:
        return "weights"
    if phase in UPDATE:
        return "update"
    return "forward" if phase in FORWARD else "other"


def _lanes(spans: Sequence[Span]) -> list[int]:
    """Return for each span the lowest lane that is free when it begins."""
    free_at: list[float] = []
    lanes = []
    for span in spans:
        lane = next((i for i, end in enumerate(free_at) if end <= span.begin), len(free_at))
        free_at[lane:lane + 1] = [span.end]  # fmt: skip
        lanes.append(lane)
    return lanes


def _phases(metrics: Path, first: int, last: int) -> Iterator[Span]:
    """Yield the phases of the steps; what lay between two of them is shared out evenly."""
    by_step = {}
    for line in metrics.read_text(encoding="utf-8").rpartition("\n")[0].splitlines():
        record = json.loads(line)
        if first <= record["step"] <= last and "at" in record and f"{TIMING}step" in record:
            by_step[record["step"]] = record
    for step, record in sorted(by_step.items()):
        seconds = {
            name.removeprefix(TIMING): value
            for name, value in record.items()
            if name.startswith(TIMING) and name.removeprefix(TIMING) not in NOT_PHASES
        }
        whole = record[f"{TIMING}step"]
        gap = max(0.0, whole - sum(seconds.values())) / (len(seconds) + 1)
        now = record["at"] - whole
        for name, value in seconds.items():
            yield Span(name=name, step=step, begin=now + gap, end=now + gap + value)
            now += gap + value


def _prompts(journals: Sequence[Path]) -> Iterator[Span]:
    steps: dict[str, int] = {}
    for journal in journals:
        # An attempt goes on with prompts that an earlier one was fed.
        yield from _prompts_of_attempt(journal, steps)


def _prompts_of_attempt(journal: Path, steps: dict[str, int]) -> Iterator[Span]:
    claimed: dict[str, float] = {}
    for event in read_journal(journal) if journal.is_file() else ():
        if event["op"] == "feed":
            steps |= {s["uid"]: s["global_step"] for s in event["specs"] if not s["validate"]}
        elif event["op"] == "claim":
            claimed |= {uid: event["at"] for uid in event["uids"] if uid in steps}
        elif event["op"] == "settle" and event["uid"] in claimed:
            uid = event["uid"]
            yield Span(name=uid, step=steps[uid], begin=claimed.pop(uid), end=event["at"])
