"""Trackers: where a step's metrics go. One that breaks is reported and never stops a run."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from rlcore.registry import Registry
from rlcore.tracking.tracker_thread import Tracker, TrackerThread, settled

OPEN_S = 120.0
"""A tracker may wait that long for its server before its first metrics."""


TRACKERS: Registry[Callable[[Path], Tracker]] = Registry("tracker")


@TRACKERS.register("file")
class JsonLinesTracker:
    """Appends {"step": N, name: value, ...} to metrics.jsonl in the run folder.

    What a process was writing when it died is dropped.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "metrics.jsonl"
        self._file = path.open("a", encoding="utf-8")
        self._file.truncate(path.read_bytes().rfind(b"\n") + 1)

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
    """All trackers of a run (verl's name), each in a thread of its own.

    Args:
        names: `trainer.logger`; `console` is the progress line of the flow and needs no tracker.
        folder: The run folder.
        open_s: Seconds that a tracker may take to open; what is logged meanwhile waits for it.

    Example:
        >>> tracking.log({"critic/score/mean": 0.5}, step=1)
        >>> await tracking.settle(deadline_s=30.0)
    """

    def __init__(self, names: list[str], folder: Path, *, open_s: float = OPEN_S) -> None:
        self.failures: list[str] = []
        """What was switched off and why, in order; the reporter tells of it."""
        self._open_s = open_s
        self._threads = [
            TrackerThread(name, lambda name=name: TRACKERS.get(name)(folder), self.failures.append)
            for name in names
            if name != "console"
        ]

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Have one step's metrics sent to every tracker that still works; returns at once."""
        logged = dict(metrics)  # the step's own may change until a tracker has opened
        for thread in self._threads:
            thread.call(lambda tracker: tracker.log(logged, step))

    async def settle(self, deadline_s: float) -> None:
        """Wait until the trackers that are open have written what was logged.

        Args:
            deadline_s: Seconds after which one that has not is switched off.
        """
        for thread in self._threads:
            if not thread.is_open and time.monotonic() - thread.began >= self._open_s:
                thread.switch_off(f"it did not open within {self._open_s:g} s")
        await self._wait([thread for thread in self._threads if thread.is_open], deadline_s)

    async def finish(self, deadline_s: float) -> None:
        """Close every tracker; one that takes longer than `deadline_s` is left behind."""
        for thread in self._threads:
            thread.close()
        await self._wait(self._threads, deadline_s)

    @staticmethod
    async def _wait(threads: list[TrackerThread], deadline_s: float) -> None:
        working = [thread for thread in threads if not thread.is_off]
        for thread in await settled(working, deadline_s):
            thread.switch_off(f"it did not answer within {deadline_s:g} s")
