"""One attempt of a run: opened before anything starts, closed whatever happened.

`open_run` checks everything, takes folder, attempt number and devices, starts the cluster's actors,
and yields the `ActiveRun` that flows and hooks work with. Nothing of a run outlives it.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

from prefect import get_run_logger
from prefect.exceptions import Pause, TerminationSignal

from rlcore.cluster.connect import hold_devices
from rlcore.cluster.start import Cluster
from rlcore.config import ResolvedConfig, resolve_config
from rlcore.data.check import check_data
from rlcore.errors import RLCoreError
from rlcore.tracking.curves import lacks_step, validation_scores
from rlcore.trainer.checkpoint import Checkpoint, CheckpointStore
from rlcore.trainer.registered import check_registered
from rlcore.trainer.run_folder import RunFolder, write_atomically
from rlcore.trainer.snapshot_room import check_room
from rlcore.trainer.snapshots import SnapshotStore, remove_leftovers
from rlcore.trainer.which_run import which_run
from tasks.active_run import ACTIVE_RUN, ActiveRun
from tasks.attempts import run_of_flow_run, this_flow_run, was_cancelled
from tasks.between_steps import (
    patient_client,
    suspension_waits_for_the_gate,
)
from tasks.retry import is_transient
from tasks.signals import sigterm_kept

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def open_run(
    preset: str | None,
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
    await asyncio.to_thread(check_registered, resolved.config)
    report = await asyncio.to_thread(check_data, resolved.config)
    who = this_flow_run()
    if resume is None and who.run_count > 1 and who.flow_run_id is not None:
        resume = run_of_flow_run(resolved.config, who.flow_run_id)
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
        await asyncio.to_thread(_make_room, resolved, folder)
        attempt = folder.begin_attempt(
            max_attempts=resolved.config.trainer.max_attempts,
            overrides=overrides,
            flow_run_id=who.flow_run_id,
        )
        await stack.enter_async_context(_recorded(folder, attempt))
        await asyncio.to_thread(_drop_later_snapshots, resolved, folder, which.checkpoint, attempt)
        stack.enter_context(patient_client(resolved.config.trainer.prefect_outage_s))
        stack.enter_context(suspension_waits_for_the_gate())
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
            run.recovery.begin_at(which.checkpoint.global_step)
        elif not which.is_new:
            logger.warning("run %s has no checkpoint: it starts at step 0 again", which.run_id)
        # Not before: a replica that joins gets what the trainer has published.
        cluster.watch_replicas(run.manager_key)
        token = ACTIVE_RUN.set(run)
        stack.callback(ACTIVE_RUN.reset, token)
        stack.callback(run.close)
        stack.push_async_exit(run.reporter.end)
        await run.reporter.begin(run.trainer.global_steps)
        with _noted(folder, attempt):
            yield run


def _make_room(resolved: ResolvedConfig, folder: RunFolder) -> None:
    """Remove the snapshots of runs that are gone, and look whether this run's have room."""
    for path in remove_leftovers():
        logger.info("removed %s, the snapshots of a run whose folder is gone", path)
    check_room(resolved.config, folder)


def _drop_later_snapshots(
    resolved: ResolvedConfig, folder: RunFolder, start: Checkpoint | None, attempt: int
) -> None:
    """Remove the run's snapshots that this attempt does not go on from."""
    snapshots = SnapshotStore(folder)
    if start is None or not resolved.config.trainer.snapshots:
        snapshots.remove()
    else:
        snapshots.rewind(start, attempt)


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
        by_a_person = await was_cancelled(this_flow_run())
        folder.end_attempt(attempt, "cancelled" if by_a_person else "terminated")
        _keep_last_step(folder, attempt)
        raise
    except TerminationSignal:
        who = this_flow_run()
        if who.deployment_id is not None and await was_cancelled(who):
            folder.end_attempt(attempt, "cancelled")
        else:
            folder.end_attempt(attempt, "terminated", "the process was asked to end (SIGTERM)")
        _keep_last_step(folder, attempt)
        raise
    except Pause:
        folder.end_attempt(attempt, "suspended")
        SnapshotStore(folder).remove()  # a checkpoint was made, which lasts as long as it takes
        raise
    except SystemExit as error:  # as a driver ends whose worker was killed; Prefect: Crashed
        folder.end_attempt(attempt, "terminated", f"the process was ended: {error!r}")
        _keep_last_step(folder, attempt)
        raise
    except BaseException as error:
        outcome = "crashed" if is_transient(error) else "failed"
        folder.end_attempt(attempt, outcome, f"{type(error).__name__}: {error}")
        if outcome == "failed":
            _keep_last_step(folder, attempt)
        raise
    folder.end_attempt(attempt, "finished")
    SnapshotStore(folder).remove()


def _keep_last_step(folder: RunFolder, attempt: int) -> None:
    """Bring the last snapshot to disk: who continues may come late, or on a host started anew.

    A run that crashed keeps it in shared memory, for the attempt that continues it soon.
    """
    try:
        SnapshotStore(folder).move_to_disk(attempt)
    except (OSError, RLCoreError) as error:  # it is complete where it is, and found there
        logger.warning("the last snapshot stays in shared memory: %s", error)


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
        async with sigterm_kept():
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
    metrics, step = run.folder.path / "metrics.jsonl", checkpoint.global_step
    scores = await asyncio.to_thread(validation_scores, metrics, up_to_step=step)
    run.trainer.state["scores"] |= scores
    run.lacks_report = await asyncio.to_thread(lacks_step, metrics, step)
    get_run_logger().info("continues from %s", checkpoint.path)
