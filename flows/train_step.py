"""One step: the phases in order, each a Prefect task; one page in the UI (or one per few steps).

    add_batch_to_generate → sample_batch → compute_reward → balance_batch → compute_old_log_probs →
    compute_advantage → update_actor → save_snapshot → commit_step → save_checkpoint →
    update_weights → validate

`update_weights` and `sleep_replicas` are tasks too: the mode's hooks call them on the checkpoint
manager. The rollout producers generate while sample_batch waits.
"""

from prefect import flow

from rlcore.trainer.phases import (
    ADD_BATCH,
    COMMIT_STEP,
    SAMPLE_BATCH,
    SAVE_CHECKPOINT,
    SAVE_SNAPSHOT,
    VALIDATE,
    active_batch_phases,
)
from tasks.active_run import ActiveRun, active_run


@flow(name="train_step", retries=0, persist_result=False, validate_parameters=False)
async def train_step(first_step: int, last_step: int) -> None:
    """Run steps `first_step` to `last_step`; fewer when the run is suspended or time is over."""
    run = active_run()
    for step in range(first_step, last_step + 1):
        if step > first_step and (run.is_over or await run.between_steps.gate() is not None):
            return
        await run_step(run, step)


async def run_step(run: ActiveRun, step: int) -> None:
    """Run one step. Each phase is safe to repeat: its key is (step, inner step, optimizer step)."""
    trainer = run.trainer
    trainer.global_steps = step
    run.begin_step()
    await run.hook("on_step_begin")
    await run.phase(ADD_BATCH)
    for inner_step in range(trainer.inner_steps):
        await run.hook("on_sample_begin")
        batch = await run.phase(SAMPLE_BATCH, inner_step=inner_step)
        await run.hook("on_sample_end")
        for phase in active_batch_phases(trainer):
            await run.phase(phase, batch, inner_step=inner_step)
    run.end_here_if_time_is_over()
    await commit(run, step)
    await run.hook("on_step_end")
    if run.is_validation_due(step):
        await validate(run)
    await run.end_step()


async def commit(run: ActiveRun, step: int) -> None:
    """Save the step, then release its rows: the ledger is saved as if that had been done."""
    saves = [SAVE_CHECKPOINT] if run.is_save_due(step) else []
    if run.config.trainer.snapshots:
        phases = [SAVE_SNAPSHOT, COMMIT_STEP, *saves]
    else:
        phases = [*saves, COMMIT_STEP]
    if len(phases) > 1:
        run.keep_metrics()
    for phase in phases:
        await run.phase(phase)


@flow(name="start_run", flow_run_name="start-after-{step:04d}", retries=0, persist_result=False)
async def start_run(step: int) -> None:
    """Publish the weights that the attempt starts from; validate them if asked to, or if missed."""
    del step
    run = active_run()
    run.begin_start()
    is_reported = run.is_start_reported()
    if run.is_start_checkpoint_due():
        await run.phase(SAVE_CHECKPOINT)
    await run.hook("on_init_end")
    if run.is_start_snapshot_due():
        await run.phase(SAVE_SNAPSHOT)
    if run.is_first_validation_due():
        await validate(run)
    await run.hook("on_train_begin")
    if is_reported:
        await run.end_step()


@flow(name="save_run", flow_run_name="save-after-{step:04d}", retries=0, persist_result=False)
async def save_run(step: int) -> None:
    """Save a run that is suspended, on a page of its own."""
    del step
    await active_run().phase(SAVE_CHECKPOINT)


@flow(name="end_run", flow_run_name="end-after-{step:04d}", retries=0, persist_result=False)
async def end_run(step: int) -> None:
    """Give the mode its last hook, on a page of its own: what it calls there are tasks."""
    del step
    await active_run().hook("on_train_end")


async def validate(run: ActiveRun) -> None:
    """Measure held-out accuracy with the weights that the replicas serve."""
    await run.hook("on_validate_begin")
    await run.phase(VALIDATE)
    await run.hook("on_validate_end")
    await run.reporter.generations(run.trainer.global_steps, run.config.trainer.log_val_generations)
