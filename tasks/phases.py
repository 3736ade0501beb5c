"""One Prefect task per phase of a step; the body runs in an executor on a copy of the trainer."""

from prefect import Task
from prefect.cache_policies import NO_CACHE

from rlcore.cluster.executor import require_executor
from rlcore.trainer.base import PPOTrainer
from rlcore.trainer.phases import (
    ADD_BATCH,
    BATCH_PHASES,
    COMMIT_STEP,
    SAMPLE_BATCH,
    SAVE_CHECKPOINT,
    SAVE_SNAPSHOT,
    VALIDATE,
    Phase,
    PhaseResult,
    run_phase,
)
from rlcore.types import BatchRef, CallKey
from tasks.retry import PHASE_OPTIONS


def phase_body(
    trainer: PPOTrainer,
    phase: Phase,
    key: CallKey,
    batch: BatchRef | None,
    deadline_s: float,
) -> PhaseResult:
    """Run one phase of the trainer; shipped to an executor."""
    require_executor(f"phase {phase.name}")
    return run_phase(trainer, phase, key, batch, deadline_s=deadline_s)


def phase_task(phase: Phase) -> Task[..., PhaseResult]:
    """Return the Prefect task of a phase: named runs, retries with backoff, nothing stored."""
    return Task(
        phase_body,
        name=phase.name,
        task_run_name=f"step-{{key.global_step:04d}}/{phase.name}",
        cache_policy=NO_CACHE,
        persist_result=False,
        **PHASE_OPTIONS,
    )


PHASE_TASKS: dict[str, Task[..., PhaseResult]] = {
    phase.name: phase_task(phase)
    for phase in (
        ADD_BATCH,
        SAMPLE_BATCH,
        *BATCH_PHASES,
        SAVE_SNAPSHOT,
        COMMIT_STEP,
        SAVE_CHECKPOINT,
        VALIDATE,
    )
}
