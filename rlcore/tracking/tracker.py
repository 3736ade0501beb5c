"""Trackers: where a step's metrics go. One that breaks is reported and never stops a run."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from rlcore.registry import Registry

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """One place for metrics."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Write one step's metrics."""

    def finish(self) -> None:
        """Flush and close."""


TRACKERS: Registry[Callable[[Path], Tracker]] = Registry("tracker")


@TRACKERS.register("file")
class JsonLinesTracker:
    """Appends {"step": N, name: value, ...} to metrics.jsonl in the run folder."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Write one line and flush it."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()

    def finish(self) -> None:
        """Close the file."""
        self._file.close()


@TRACKERS.register("tensorboard")
class TensorBoardTracker:
    """Writes scalars to tensorboard/ in the run folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder / "tensorboard"))

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Write one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self) -> None:
        """Close the event file."""
        self._writer.close()


@TRACKERS.register("wandb")
class WandbTracker:
    """Sends metrics to Weights & Biases; a resumed run goes on in the same wandb run.

    Account, server and mode are wandb's own environment (WANDB_API_KEY, WANDB_BASE_URL,
    WANDB_MODE=offline, for which `wandb sync` sends later). Files lie in wandb/ in the run folder.
    """

    def __init__(self, folder: Path) -> None:
        import wandb

        record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        trainer = record["trainer"]
        self._run = wandb.init(
            dir=str(folder),
            id=folder.name,
            name=folder.name,
            project=trainer["project_name"],
            group=trainer["experiment_name"],
            config=record,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Send one step's metrics."""
        self._run.log(metrics, step=step)

    def finish(self) -> None:
        """Send the rest and close the run."""
        self._run.finish()


class Tracking:
    """All trackers of a run (verl's name).

    Args:
        names: `trainer.logger`; `console` is the progress line of the flow and needs no tracker.
        folder: The run folder.
    """

    def __init__(self, names: list[str], folder: Path) -> None:
        self._trackers: dict[str, Tracker] = {}
        self.failures: list[str] = []
        """What was switched off and why, in order; the reporter tells of it."""
        for name in names:
            if name != "console":
                self._guard(name, lambda name=name: self._open(name, folder))

    def _open(self, name: str, folder: Path) -> None:
        self._trackers[name] = TRACKERS.get(name)(folder)

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Send one step's metrics to every tracker that still works."""
        for name, tracker in list(self._trackers.items()):
            self._guard(name, lambda tracker=tracker: tracker.log(metrics, step))

    def finish(self) -> None:
        """Close every tracker."""
        for name, tracker in list(self._trackers.items()):
            self._guard(name, tracker.finish)

    def _guard(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # whatever a third party's tracker raises, the run goes on
            logger.exception("tracker %s failed and is switched off for this run", name)
            self._trackers.pop(name, None)
            self.failures.append(f"tracker {name} is switched off: {error!r}")
