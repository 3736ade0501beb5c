"""One attempt of a run while it lasts: what flows and hooks work with (`active_run()`).

One file, though a long one: what is due when, and what a phase does to state, metrics and
deadlines, is read from the same fields.
"""

import asyncio
import logging
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

from prefect.task_runners import TaskRunner

from rlcore.cluster.start import Cluster
from rlcore.config import RunConfig
from rlcore.daemon_thread import DaemonThread
from rlcore.errors import DeadlineExceededError
from rlcore.tracking.curves import read_metrics
from rlcore.tracking.inner_steps import add_inner_step
from rlcore.trainer.base import PPOTrainer, TrainerResources
from rlcore.trainer.checkpoint import CheckpointStore
from rlcore.trainer.modes import get_trainer_cls
from rlcore.trainer.phases import Metrics, Phase, PhaseResult
from rlcore.trainer.run_folder import RunFolder
from rlcore.trainer.snapshots import saved_at
from rlcore.types import BatchRef, CallKey
from tasks.attempts import this_flow_run
from tasks.between_steps import (
    BetweenSteps,
    auto_page_size,
)
from tasks.deadlines import HISTORY, PhaseDeadlines
from tasks.phases import PHASE_TASKS
from tasks.records import RecordWindow
from tasks.report import Reporter
from tasks.runner import PhaseFuture, PhaseRunner, RunnerOptions
from tasks.training_recovery import TrainingRecovery
from tasks.weights import TaskCheckpointManager

logger = logging.getLogger(__name__)

HOOK_FACTOR = 5
"""A hook's own work may take this many deadlines of `update_weights`. Its calls on the checkpoint
manager are not counted: each has a deadline, retries and the waits between them of its own."""
CALL_POLL_S = 0.1
"""How often a hook is looked at whose own time is nearly over, while one of its calls runs."""

GROUP_RESTARTS = "training/group_restarts"
"""How often the training group was started anew in the step."""

STEP_METRICS = "step_metrics"
"""Where the trainer's state holds what a checkpoint knows of its step's report."""

ACTIVE_RUN: ContextVar["ActiveRun"] = ContextVar("active_run")
"""Set by `tasks.lifecycle.open_run`; read it by `active_run()`."""


def active_run() -> "ActiveRun":
    """Return the run that the calling flow is part of.

    Raises:
        LookupError: called outside a run: step pages and producers are subflows of `train`.
    """
    try:
        return ACTIVE_RUN.get()
    except LookupError:
        raise LookupError(
            "no active run: step pages and producers are subflows of flows.train.train"
        ) from None


class ActiveRun:
    """What flows and hooks of one attempt work with."""

    def __init__(
        self, *, config: RunConfig, folder: RunFolder, attempt: int, cluster: Cluster, rows: int
    ) -> None:
        self.config = config
        self.folder = folder
        self.attempt = attempt
        self.cluster = cluster
        self.total_steps = config.total_steps(rows)
        self.deadlines = PhaseDeadlines(config)
        # Prefect types a runner by its futures; ours are not those of RayTaskRunner.
        self._phase_runner = PhaseRunner(
            cluster.executors, RunnerOptions(run_id=folder.run_id, attempt=attempt)
        )
        self.runner = cast("TaskRunner[Any]", self._phase_runner)
        self.stop = asyncio.Event()
        self.drain_s = config.deadlines.drain
        resources = TrainerResources(
            folder=folder,
            attempt=attempt,
            ledger=cluster.ledger,
            training=cluster.training,
            checkpoint_manager=cluster.checkpoint_manager,
            total_steps=self.total_steps,
            reward_model=cluster.reward_model,
        )
        mode = config.trainer.v1.trainer_mode
        self.trainer: PPOTrainer = get_trainer_cls(mode)(config, resources)
        self.recovery = TrainingRecovery(
            cluster,
            saved=lambda step: saved_at(folder, step),
            key=self.key,
            redo=self._submit,
            is_enabled=config.trainer.snapshots,
            start_s=config.deadlines.start,
        )
        self._manager = TaskCheckpointManager(
            cluster.checkpoint_manager,
            key=self.manager_key,
            deadlines=self.deadlines,
            start_s=config.deadlines.start,
            restore=self.recovery.restore_from_thread,
        )
        self.trainer.checkpoint_manager = self._manager
        self.reporter = Reporter(
            run_id=folder.run_id,
            flow_run_id=this_flow_run().flow_run_id,
            folder=folder.path,
            total_steps=self.total_steps,
            trackers=list(config.trainer.logger),
            labels={
                "rollflow.project": config.trainer.project_name,
                "rollflow.experiment": config.trainer.experiment_name,
            },
        )
        self._producers_ready = [asyncio.Event() for _ in range(self.num_producers)]
        self._hooks = DaemonThread("hooks")
        self.between_steps = BetweenSteps(
            flow_run_id=this_flow_run().flow_run_id,
            outage_s=config.trainer.prefect_outage_s,
            max_wall_s=config.trainer.max_wall_s,
        )
        self._records = RecordWindow()
        self._metrics: Metrics = {}
        self._step_began = 0.0
        self._step_seconds: deque[float] = deque(maxlen=HISTORY)
        self._inner_step = 0
        self._last_step = self.total_steps
        self.lacks_report = False
        """The step that the attempt starts from was saved and not reported."""

    @property
    def num_producers(self) -> int:
        """Producers, one per AgentLoopWorker."""
        return self.config.actor_rollout_ref.rollout.agent.num_workers

    def key(self, phase: str, inner_step: int = 0) -> CallKey:
        """Return the key that calls of a phase carry; the task runner counts on from its try."""
        return CallKey(
            run_id=self.folder.run_id,
            attempt=self.attempt,
            global_step=self.trainer.global_steps,
            inner_step=inner_step,
            phase=phase,
            try_number=self.recovery.first_try,
        )

    def manager_key(self, phase: str) -> CallKey:
        """Return the key of a call that a hook makes now."""
        return self.key(phase, self._inner_step)

    async def hook(self, name: str) -> None:
        """Run one of the trainer's hooks in the hooks' thread, and wait for its end.

        Raises:
            DeadlineExceededError: it hangs; the thread does not keep the process alive.
        """
        self.recovery.loop, restarts = asyncio.get_running_loop(), self.recovery.restarts
        began, clock = time.monotonic(), self._manager.clock
        in_calls_before_s = clock.seconds()
        waiting = asyncio.wrap_future(self._hooks.submit(getattr(self.trainer, name)))
        deadline_s = HOOK_FACTOR * self.deadlines.for_phase("update_weights")
        try:
            while not waiting.done():
                in_calls_s = clock.seconds() - in_calls_before_s
                left_s = deadline_s - (time.monotonic() - began - in_calls_s)
                if left_s <= 0:
                    raise DeadlineExceededError(
                        f"hook {name} of {type(self.trainer).__name__} did not return within "
                        f"{deadline_s:g} s (step {self.trainer.global_steps})"
                    )
                await asyncio.wait({waiting}, timeout=max(left_s, CALL_POLL_S))
            waiting.result()
        finally:
            waiting.cancel()  # whatever comes of it later, nobody waits for it
        self._metrics[f"timing_s/{name}"] = time.monotonic() - began
        self._count_restarts(restarts)

    async def phase(
        self, phase: Phase, batch: BatchRef | None = None, *, inner_step: int = 0
    ) -> BatchRef | None:
        """Run one phase as a task of the page; apply its state and metrics when it succeeded.

        When the training group is lost meanwhile, it is started anew and the phase goes on.
        """
        self._inner_step = inner_step
        began, restarts = time.monotonic(), self.recovery.restarts
        result = await self.recovery.guard(lambda: self._submit(phase, batch, inner_step))
        seconds = time.monotonic() - began
        self.recovery.note(phase, batch, inner_step, self.trainer.global_steps)
        self.trainer.state = result.state
        found = {**result.metrics, f"timing_s/{phase.name}": seconds}
        self._metrics = add_inner_step(self._metrics, found, inner_step)
        self._count_restarts(restarts)
        if phase.name == "save_checkpoint":
            step = self.trainer.global_steps
            await self.reporter.checkpoint(step, CheckpointStore(self.folder).at(step).path)
        return result.batch or batch

    def _count_restarts(self, before: int) -> None:
        """Add the restarts of the training group since `before` to the step's."""
        so_far = self._metrics.get(GROUP_RESTARTS, 0.0)
        self._metrics[GROUP_RESTARTS] = so_far + self.recovery.restarts - before

    async def _submit(self, phase: Phase, batch: BatchRef | None, inner_step: int) -> PhaseResult:
        deadline_s = self.deadlines.for_phase(phase.name)
        call = PHASE_TASKS[phase.name].with_options(timeout_seconds=deadline_s)
        key = self.key(phase.name, inner_step)
        began = time.monotonic()
        future = call.submit(self.trainer, phase, key, batch, deadline_s)
        result: PhaseResult = await cast("PhaseFuture[PhaseResult]", future)
        self._records.note(future.task_run_id)
        self.deadlines.record(phase.name, time.monotonic() - began)
        return result

    def pages(self) -> Iterator[tuple[int, int]]:
        """Yield first and last step of every page that is left; a page may end before its last."""
        if self.config.trainer.val_only:
            return
        while (first := self.trainer.global_steps + 1) <= self._last_step:
            yield first, min(first + self._page_size() - 1, self._last_step)

    def _page_size(self) -> int:
        size = self.config.trainer.steps_per_page
        if size != "auto":
            return size
        seconds = statistics.median(self._step_seconds) if self._step_seconds else None
        return auto_page_size(seconds, self.total_steps)

    def end_here_if_time_is_over(self) -> None:
        """Make the step that runs the last one once `max_wall_s` has passed."""
        step = self.trainer.global_steps
        if self.between_steps.is_time_over and step < self._last_step:
            logger.warning(
                "trainer.max_wall_s=%g is over: step %d of %d is the last of this attempt",
                self.config.trainer.max_wall_s, step, self.total_steps,
            )  # fmt: skip
            self._last_step = step

    @property
    def is_over(self) -> bool:
        """Whether the last step of this attempt is made."""
        return self.trainer.global_steps >= self._last_step

    @property
    def _is_cut_short(self) -> bool:
        return self._last_step < self.total_steps

    @staticmethod
    def page_name(first: int, last: int) -> str:
        """Return `step-0012`, or `steps-0101-0150` for a page of several."""
        return f"step-{first:04d}" if first == last else f"steps-{first:04d}-{last:04d}"

    def is_save_due(self, step: int) -> bool:
        """Whether checkpoint `step` is written (verl: every save_freq steps and at the end)."""
        freq = self.config.trainer.save_freq
        is_last = step == self._last_step
        return (is_last and self._is_cut_short) or (freq > 0 and (step % freq == 0 or is_last))

    def is_validation_due(self, step: int) -> bool:
        """Whether step `step` is validated (verl: every test_freq steps and at the end)."""
        freq = self.config.trainer.test_freq
        is_last = step == self._last_step
        return (is_last and self._is_cut_short) or (freq > 0 and (step % freq == 0 or is_last))

    @property
    def has_checkpoint(self) -> bool:
        """Whether the step that was made last is saved."""
        return self.trainer.global_steps in CheckpointStore(self.folder).steps()

    def is_start_snapshot_due(self) -> bool:
        """Whether what the attempt starts from is saved nowhere: a lost group goes back to it."""
        trainer, step = self.config.trainer, self.trainer.global_steps
        return trainer.snapshots and not trainer.val_only and saved_at(self.folder, step) is None

    def is_start_checkpoint_due(self) -> bool:
        """Whether the attempt before died between snapshot N and checkpoint N, which was due."""
        step = self.trainer.global_steps
        is_due = step > 0 and self.is_save_due(step) and not self.config.trainer.val_only
        return is_due and not self.has_checkpoint

    def is_first_validation_due(self) -> bool:
        """Whether the weights that the attempt starts from are validated first.

        Those of step 1 if asked to. Those of a later step if theirs was due and is not known: the
        attempt before died after checkpoint N and before validation N was reported.
        """
        trainer, step = self.config.trainer, self.trainer.global_steps
        if trainer.val_only:
            return True
        if step == 0:
            return trainer.val_before_train
        return self.is_validation_due(step) and str(step) not in self.trainer.state["scores"]

    def begin_start(self) -> None:
        """Start the metrics of the step that the attempt starts from.

        A report that is missing begins with what the checkpoint knows of its step.
        """
        self.begin_step()
        kept = self.trainer.state.get(STEP_METRICS, {})
        if self.lacks_report and kept.get("training/global_step") == self.trainer.global_steps:
            self._metrics = dict(kept)
            self._step_began -= kept["timing_s/step"]

    def is_start_reported(self) -> bool:
        """Whether the start of the attempt has a report: at step 0, or where one is missing."""
        is_new = self.trainer.global_steps == 0 or self.config.trainer.val_only
        return is_new or self.lacks_report or self.is_first_validation_due()

    def keep_metrics(self) -> None:
        """Give the step's metrics so far to its checkpoint: the report comes after it."""
        self.trainer.state[STEP_METRICS] = {
            **self._metrics,
            "training/global_step": float(self.trainer.global_steps),
            "timing_s/step": time.monotonic() - self._step_began,
        }

    def begin_step(self) -> None:
        """Start the clock and the metrics of a step."""
        self._metrics = {}
        self._step_began = time.monotonic()

    async def end_step(self) -> None:
        """Report the step."""
        step = self.trainer.global_steps
        self._metrics["training/global_step"] = float(step)
        seconds = time.monotonic() - self._step_began
        self._metrics["timing_s/step"] = seconds
        self._step_seconds.append(seconds)
        retries = self._phase_runner.retry_counts()
        self._metrics["training/phase_retries"] = float(sum(retries.values()))
        update = self._manager.last_update
        for name in ("bytes", "seconds", "gb_per_s", "version"):
            if name in update:
                self._metrics[f"checkpoint_engine/{name}"] = float(update[name])
        await self.between_steps.wait_for_server()
        await self._records.catch_up()
        await self.reporter.step(step, self._metrics)

    def close(self) -> None:
        """Close the hooks' thread; say that it is over."""
        self.reporter.event("run.ended", step=self.trainer.global_steps)
        self._hooks.close()

    async def wait_producers_ready(self) -> None:
        """Wait until every producer's worker claims prompts.

        Raises:
            DeadlineExceededError: names the producers that are not ready.
        """
        deadline_s = 2 * self.config.deadlines.start
        try:
            async with asyncio.timeout(deadline_s):
                for ready in self._producers_ready:
                    await ready.wait()
        except TimeoutError:
            late = [i for i, ready in enumerate(self._producers_ready) if not ready.is_set()]
            raise DeadlineExceededError(
                f"run {self.folder.run_id} waited {deadline_s:.0f} s for rollout producers {late}"
            ) from None

    def producer_is_ready(self, index: int) -> None:
        """Say that the worker of producer `index` claims prompts."""
        self._producers_ready[index].set()

    async def finish(self) -> dict[str, Any]:
        """Export the model, draw the curves and say where everything is."""
        path = self.folder.path
        summary: dict[str, Any] = {"run_id": self.folder.run_id, "run_folder": str(path)}
        if self._is_cut_short:
            summary["ended_after"] = (
                f"step {self._last_step} of {self.total_steps}, by trainer.max_wall_s; "
                f"`rollflow resume {self.folder.run_id}` goes on"
            )
        if self.trainer.global_steps > 0:
            await self.recovery.guard(
                lambda: asyncio.to_thread(
                    self.cluster.training.export_hf, self.key("export"), path / "model"
                )
            )
            summary["model"] = str(path / "model")
        metrics_file = path / "metrics.jsonl"
        if metrics_file.exists():
            summary["curves"] = [str(curve) for curve in await self.reporter.curves()]
            summary |= _accuracies(metrics_file)
        self.reporter.event("run.finished", **summary)
        return summary


def _accuracies(metrics_file: Path) -> dict[str, Any]:
    """First and last validation of the run, or the only one."""
    validated = [m for m in read_metrics(metrics_file).values() if "val-aux/accuracy" in m]
    found = [
        {
            "mean": round(m["val-aux/accuracy"], 4),
            "stderr": round(m["val-aux/accuracy_stderr"], 4),
            "n": int(m["val-aux/num_prompts"]),
        }
        for m in validated
    ]
    if len(found) <= 1:
        return {"accuracy": found[0]} if found else {}
    return {"accuracy_before": found[0], "accuracy_after": found[-1]}
