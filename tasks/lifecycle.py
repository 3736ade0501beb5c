"""One attempt of a run: opened before anything starts, closed whatever happened.

`open_run` checks everything, takes folder, attempt number and devices, starts the cluster's actors,
and yields the `ActiveRun` that flows and hooks work with. Nothing of a run outlives it.
"""

import asyncio
import contextlib
import contextvars
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

from prefect import get_run_logger
from prefect.task_runners import TaskRunner

from rlcore.cluster.start import Cluster, hold_devices
from rlcore.config import ResolvedConfig, RunConfig, resolve_config
from rlcore.data.check import check_data
from rlcore.errors import DeadlineExceededError
from rlcore.tracking.curves import draw_curves, read_metrics, validation_scores
from rlcore.trainer.base import PPOTrainer, TrainerResources
from rlcore.trainer.checkpoint import Checkpoint, CheckpointStore
from rlcore.trainer.modes import get_trainer_cls
from rlcore.trainer.phases import Metrics, Phase, PhaseResult
from rlcore.trainer.run_folder import RunFolder, write_atomically
from rlcore.trainer.which_run import which_run
from rlcore.types import BatchRef, CallKey
from tasks.deadlines import PhaseDeadlines
from tasks.phases import PHASE_TASKS
from tasks.report import Reporter
from tasks.retry import is_transient
from tasks.runner import PhaseFuture, PhaseRunner, RunnerOptions
from tasks.weights import TaskCheckpointManager

logger = logging.getLogger(__name__)

HOOK_FACTOR = 5
"""A hook may take this many deadlines of `update_weights`, which has three retries."""

_ACTIVE: ContextVar["ActiveRun"] = ContextVar("active_run")


def active_run() -> "ActiveRun":
    """Return the run that the calling flow is part of.

    Raises:
        LookupError: called outside a run: step pages and producers are subflows of `train`.
    """
    try:
        return _ACTIVE.get()
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
        )
        mode = config.trainer.v1.trainer_mode
        self.trainer: PPOTrainer = get_trainer_cls(mode)(config, resources)
        self._manager = TaskCheckpointManager(
            cluster.checkpoint_manager, key=self._manager_key, deadlines=self.deadlines
        )
        self.trainer.checkpoint_manager = self._manager
        cluster.watch_replicas(self._manager_key)
        self.reporter = Reporter(
            run_id=folder.run_id,
            folder=folder.path,
            total_steps=self.total_steps,
            trackers=list(config.trainer.logger),
            labels={
                "rollflow.project": config.trainer.project_name,
                "rollflow.experiment": config.trainer.experiment_name,
            },
        )
        self._producers_ready = [asyncio.Event() for _ in range(self.num_producers)]
        self._hooks = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hooks")
        self._metrics: Metrics = {}
        self._step_began = 0.0
        self._inner_step = 0

    @property
    def num_producers(self) -> int:
        """Producers, one per AgentLoopWorker."""
        return self.config.actor_rollout_ref.rollout.agent.num_workers

    def key(self, phase: str, inner_step: int = 0) -> CallKey:
        """Return the key that calls of a phase carry; its try is counted by the task runner."""
        return CallKey(
            run_id=self.folder.run_id,
            attempt=self.attempt,
            global_step=self.trainer.global_steps,
            inner_step=inner_step,
            phase=phase,
        )

    def _manager_key(self, phase: str) -> CallKey:
        return self.key(phase, self._inner_step)

    async def hook(self, name: str) -> None:
        """Run one of the trainer's hooks in the hooks' thread."""
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        began = time.monotonic()
        call = loop.run_in_executor(self._hooks, context.run, getattr(self.trainer, name))
        # Its phases' deadlines and retries lie within; this one is for a hook that hangs itself.
        deadline_s = HOOK_FACTOR * self.deadlines.for_phase("update_weights")
        try:
            await asyncio.wait_for(call, deadline_s)
        except TimeoutError:
            raise DeadlineExceededError(
                f"hook {name} of {type(self.trainer).__name__} did not return within "
                f"{deadline_s:.0f} s (step {self.trainer.global_steps})"
            ) from None
        self._metrics[f"timing_s/{name}"] = time.monotonic() - began

    async def phase(
        self, phase: Phase, batch: BatchRef | None = None, *, inner_step: int = 0
    ) -> BatchRef | None:
        """Run one phase as a task of the page; apply its state and metrics when it succeeded."""
        deadline_s = self.deadlines.for_phase(phase.name)
        call = PHASE_TASKS[phase.name].with_options(timeout_seconds=deadline_s)
        self._inner_step = inner_step
        key = self.key(phase.name, inner_step)
        began = time.monotonic()
        future = call.submit(self.trainer, phase, key, batch, deadline_s)
        result: PhaseResult = await cast("PhaseFuture[PhaseResult]", future)
        seconds = time.monotonic() - began
        self.deadlines.record(phase.name, seconds)
        self.trainer.state = result.state
        self._metrics |= result.metrics
        self._metrics[f"timing_s/{phase.name}"] = seconds
        if phase.name == "save_checkpoint":
            self.reporter.event("checkpoint.saved", step=self.trainer.global_steps)
        return result.batch or batch

    def pages(self) -> Iterator[tuple[int, int]]:
        """Yield first and last step of every page that is left."""
        if self.config.trainer.val_only:
            return
        size = self.config.trainer.steps_per_page
        for first in range(self.trainer.global_steps + 1, self.total_steps + 1, size):
            yield first, min(first + size - 1, self.total_steps)

    @staticmethod
    def page_name(first: int, last: int) -> str:
        """Return `step-0012`, or `steps-0101-0150` for a page of several."""
        return f"step-{first:04d}" if first == last else f"steps-{first:04d}-{last:04d}"

    def is_save_due(self, step: int) -> bool:
        """Whether checkpoint `step` is written (verl: every save_freq steps and at the end)."""
        freq = self.config.trainer.save_freq
        return freq > 0 and (step % freq == 0 or step == self.total_steps)

    def is_validation_due(self, step: int) -> bool:
        """Whether step `step` is validated (verl: every test_freq steps and at the end)."""
        freq = self.config.trainer.test_freq
        return freq > 0 and (step % freq == 0 or step == self.total_steps)

    def is_first_validation_due(self) -> bool:
        """Whether the weights are validated before step 1."""
        trainer = self.config.trainer
        return (trainer.val_before_train and self.trainer.global_steps == 0) or trainer.val_only

    def begin_step(self) -> None:
        """Start the clock and the metrics of a step."""
        self._metrics = {}
        self._step_began = time.monotonic()

    async def end_step(self) -> None:
        """Report the step."""
        step = self.trainer.global_steps
        self._metrics["training/global_step"] = float(step)
        self._metrics["timing_s/step"] = time.monotonic() - self._step_began
        retries = self._phase_runner.retry_counts()
        self._metrics["training/phase_retries"] = float(sum(retries.values()))
        update = self._manager.last_update
        for name in ("bytes", "seconds", "gb_per_s", "version"):
            if name in update:
                self._metrics[f"checkpoint_engine/{name}"] = float(update[name])
        await self.reporter.step(step, self._metrics)

    def close(self) -> None:
        """Take the progress bar away, close trackers and the hooks' thread."""
        self.reporter.end()
        self._hooks.shutdown(wait=False, cancel_futures=True)

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
        if self.trainer.global_steps > 0:
            await asyncio.to_thread(
                self.cluster.training.export_hf, self.key("export"), path / "model"
            )
            summary["model"] = str(path / "model")
        metrics_file = path / "metrics.jsonl"
        if metrics_file.exists():
            curves = await asyncio.to_thread(draw_curves, metrics_file, path / "curves")
            summary["curves"] = [str(curve) for curve in curves]
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


@contextlib.asynccontextmanager
async def open_run(
    preset: str,
    overrides: dict[str, Any] | None,
    config: dict[str, Any] | None,
    resume: str | None,
) -> AsyncIterator[ActiveRun]:
    """Open one attempt; see flows.train.train for the parameters.

    Raises:
        ConfigError, DataError: found before anything starts; every problem is listed.
        DeviceLockError: another run holds the folder or the devices; names it.
        CheckpointError: there is nothing to resume, or it cannot be read.
    """
    request = {"preset": preset, "overrides": overrides or {}, "config": config}
    resolved = resolve_config(preset, overrides or {}, config)
    report = await asyncio.to_thread(check_data, resolved.config)
    which = which_run(resolved.config, resume)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(hold_devices(resolved.config, f"run {which.run_id}"))
        if resume or resolved.config.trainer.default_local_dir or not which.is_new:
            # While this attempt waited for the devices, the run may have gone on without it.
            which = which_run(resolved.config, resume)
        folder = RunFolder.create(which.path, run_id=which.run_id, request=request)
        stack.enter_context(folder.hold())
        text = json.dumps(resolved.config.model_dump(mode="json"), indent=2)
        write_atomically(folder.path / "config.json", text + "\n")
        attempt = folder.begin_attempt(
            max_attempts=resolved.config.trainer.max_attempts, overrides=overrides
        )
        await stack.enter_async_context(_recorded(folder, attempt))
        cluster = await stack.enter_async_context(
            _cluster(resolved, folder, attempt, resolved.config.total_steps(report.num_train))
        )
        run = ActiveRun(
            config=resolved.config,
            folder=folder,
            attempt=attempt,
            cluster=cluster,
            rows=report.num_train,
        )
        if which.checkpoint is not None:
            CheckpointStore(folder).rewind(which.checkpoint, attempt)
            await _restore(run, which.checkpoint)
        elif not which.is_new:
            logger.warning("run %s has no checkpoint: it starts at step 0 again", which.run_id)
        token = _ACTIVE.set(run)
        stack.callback(_ACTIVE.reset, token)
        stack.callback(run.close)
        await run.reporter.begin(run.trainer.global_steps)
        with _noted(folder, attempt):
            yield run


@contextlib.contextmanager
def _noted(folder: RunFolder, attempt: int) -> Iterator[None]:
    """Add to an error which attempt it ended, and what continues the run."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"This ended attempt {attempt} of run {folder.run_id} in {folder.path}; once the cause "
            f"is gone, `rollflow resume {folder.run_id}` continues it"
        )
        raise


@contextlib.asynccontextmanager
async def _recorded(folder: RunFolder, attempt: int) -> AsyncIterator[None]:
    """Write into run.json how the attempt ended."""
    try:
        yield
    except asyncio.CancelledError:
        folder.end_attempt(attempt, "cancelled")
        raise
    except BaseException as error:
        outcome = "crashed" if is_transient(error) else "failed"
        folder.end_attempt(attempt, outcome, f"{type(error).__name__}: {error}")
        raise
    folder.end_attempt(attempt, "finished")


@contextlib.asynccontextmanager
async def _cluster(
    resolved: ResolvedConfig, folder: RunFolder, attempt: int, total_steps: int
) -> AsyncIterator[Cluster]:
    """Start the actors of a run; end them whatever happened."""
    run_logger = get_run_logger()
    for notice in resolved.notices:
        run_logger.info(notice)
    cluster = Cluster(resolved.config, folder=folder, attempt=attempt, total_steps=total_steps)
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.shutdown()


async def _restore(run: ActiveRun, checkpoint: Checkpoint) -> None:
    content = await asyncio.to_thread(checkpoint.load_trainer)
    key = run.key("restore")
    await asyncio.to_thread(run.cluster.training.load_checkpoint, key, checkpoint.actor_path)
    await asyncio.to_thread(run.cluster.ledger.load_state_dict, key, content["ledger"])
    run.trainer.restore(content)
    # Checkpoint N was written before validation N and does not know its accuracy.
    run.trainer.state["scores"] |= validation_scores(
        run.folder.path / "metrics.jsonl", up_to_step=checkpoint.global_step
    )
    get_run_logger().info("continues from %s", checkpoint.path)
