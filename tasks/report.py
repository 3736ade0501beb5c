"""What a person sees of a run: console lines, Prefect artifacts and events. Driver only."""

import asyncio
import itertools
import json
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from prefect import get_run_logger
from prefect.artifacts import (
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)
from prefect.events import emit_event
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlcore.tracking.tracker import Tracking

logger = logging.getLogger(__name__)

T = TypeVar("T")

REQUEST_S = 30.0
"""For one artifact, or for the trackers; what is shown never holds the run up for longer."""

FINISH_S = 60.0
"""For trackers to send the rest after the last step."""

CUT_SHORT_S = 3.0
"""The same where a run fails or is cancelled: everything is to be free within 25 s."""

TABLE_EVERY = 200
"""The metrics table is renewed every max(1, steps / TABLE_EVERY) steps."""

SHOWN = {
    "critic/score/mean": "reward",
    "val-aux/accuracy": "accuracy",
    "response_length/mean": "length",
    "actor/pg_loss": "pg_loss",
    "actor/grad_norm": "grad_norm",
    "actor/entropy": "entropy",
    "timing_s/step": "s/step",
}


class Reporter:
    """Reports the steps of one attempt.

    Args:
        run_id: Names the run in every report.
        folder: The run folder.
        total_steps: Steps of the run.
        trackers: `trainer.logger`.
        labels: Of the run's events, for automations that choose by project or experiment. (Tags
            would be simpler, but cost a request per task run: each may have a concurrency limit.)
    """

    def __init__(
        self,
        *,
        run_id: str,
        folder: Path,
        total_steps: int,
        trackers: list[str],
        labels: dict[str, str],
    ) -> None:
        self._run_id = run_id
        self._labels = labels
        self._folder = folder
        self._total = total_steps
        self._tracking = Tracking(trackers, folder)
        self._told_failures = 0
        self._artifact: UUID | None = None
        self._rows: list[dict[str, Any]] = []
        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable="console" not in trackers or not self._console.is_terminal,
        )
        self._bar = self._progress.add_task(f"run {run_id}", total=total_steps)
        self._prints = "console" in trackers

    async def begin(self, done_steps: int) -> None:
        """Show the bar and make the progress artifact."""
        self._progress.start()
        self._progress.update(self._bar, completed=done_steps)
        self._artifact = await _shown_or_logged(
            acreate_progress_artifact(
                progress=100.0 * done_steps / max(1, self._total),
                description=f"run {self._run_id}: step {done_steps} of {self._total}",
            )
        )

    async def step(self, step: int, metrics: dict[str, float]) -> None:
        """Report a step that is complete, step 0 being the start."""
        self._tracking.log(metrics, step)
        await self._tracking.settle(REQUEST_S)
        self._tell_of_failed_trackers()
        self._rows.append({"step": step, **_shown(metrics)})
        self._line(step, metrics)
        if step == 0:
            return
        self._progress.update(self._bar, completed=step)
        if self._artifact is not None:
            await _shown_or_logged(
                aupdate_progress_artifact(
                    self._artifact,
                    progress=100.0 * step / max(1, self._total),
                    description=f"run {self._run_id}: step {step} of {self._total}",
                )
            )
        self.event("step.completed", step=step, **_shown(metrics))
        if step % max(1, self._total // TABLE_EVERY) == 0 or step == self._total:
            await _shown_or_logged(
                acreate_table_artifact(
                    key="metrics", table=self._rows, description=f"metrics of run {self._run_id}"
                )
            )

    def _tell_of_failed_trackers(self) -> None:
        for failure in self._tracking.failures[self._told_failures :]:
            get_run_logger().error(failure)
            self.event("tracker.failed", reason=failure)
        self._told_failures = len(self._tracking.failures)

    async def generations(self, step: int, limit: int) -> None:
        """Show the first `limit` responses of a validation (trainer.log_val_generations)."""
        path = self._folder / "generations" / f"step-{step:04d}.jsonl"
        if limit == 0 or not path.is_file():
            return
        with path.open(encoding="utf-8") as file:
            lines = [json.loads(line) for line in itertools.islice(file, limit)]
        shown = ("prompt", "responses", "ground_truth", "score")
        await _shown_or_logged(
            acreate_table_artifact(
                key="generations",
                table=[{name: line[name] for name in shown} for line in lines],
                description=f"validation of step {step} of run {self._run_id}",
            )
        )

    def event(self, name: str, **payload: Any) -> None:
        """Emit `rollflow.<name>` about this run."""
        emit_event(
            event=f"rollflow.{name}",
            resource={"prefect.resource.id": f"rollflow.run.{self._run_id}", **self._labels},
            payload=payload,
        )

    async def end(self, error: type[BaseException] | None, *_: object) -> None:
        """Take the bar away and close the trackers; briefly if an error ends the run.

        Args:
            error: As an exit stack passes it.
        """
        self._progress.stop()
        await self._tracking.finish(FINISH_S if error is None else CUT_SHORT_S)
        self._tell_of_failed_trackers()

    def _line(self, step: int, metrics: dict[str, float]) -> None:
        text = "  ".join(f"{name} {value:.4g}" for name, value in _shown(metrics).items())
        logger.info("step %d/%d  %s", step, self._total, text)
        if self._prints:
            self._console.print(
                f"step {step:>4}/{self._total}  {text}", highlight=False, soft_wrap=True
            )


async def _shown_or_logged(call: Awaitable[T]) -> T | None:
    """Await a request of Prefect's server; one that fails is logged, and the run goes on."""
    try:
        return await asyncio.wait_for(call, REQUEST_S)
    except Exception:
        logger.exception("an artifact could not be written")
        return None


def _shown(metrics: dict[str, float]) -> dict[str, float]:
    return {short: round(metrics[name], 6) for name, short in SHOWN.items() if name in metrics}
