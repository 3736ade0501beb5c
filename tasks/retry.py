"""Which failures of a phase are tried again: faults that may pass, and nothing else."""

from collections.abc import Callable
from typing import Any, TypedDict

import ray.exceptions
from prefect import Task
from prefect.client.schemas.objects import State, TaskRun

from rlcore.errors import TrainingGroupLostError, TransientError

TRANSIENT_ERRORS: tuple[type[BaseException], ...] = (
    TransientError,
    TimeoutError,
    ray.exceptions.RayActorError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.LocalRayletDiedError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.OwnerDiedError,
    ray.exceptions.RpcError,
)
"""A process or connection died, or a wait was overdue."""

PHASE_RETRIES = 3
PHASE_RETRY_DELAYS_S: list[float] = [1, 4, 16]


def is_transient(error: object) -> bool:
    """Say whether `error` is a fault that may pass."""
    if isinstance(error, TRANSIENT_ERRORS):
        return True
    # An error that crossed a Ray call is wrapped; what counts is what was raised there.
    is_wrapped = isinstance(error, ray.exceptions.RayTaskError)
    return is_wrapped and isinstance(error.cause, TRANSIENT_ERRORS)


def retry_transient(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Say whether a failed phase is tried again; Prefect's `retry_condition_fn`.

    User errors (config, data, reward code), fenced calls and errors of the program are not, nor is
    a lost training group: it has to be started anew first (tasks/training_recovery.py).
    """
    del task, task_run
    return is_transient(state.data) and not isinstance(state.data, TrainingGroupLostError)


class PhaseOptions(TypedDict):
    """Prefect's names of what all phases have in common."""

    retries: int
    retry_delay_seconds: list[float]
    retry_jitter_factor: float
    retry_condition_fn: Callable[[Task[..., Any], TaskRun, State[Any]], bool]


PHASE_OPTIONS: PhaseOptions = {
    "retries": PHASE_RETRIES,
    "retry_delay_seconds": PHASE_RETRY_DELAYS_S,
    "retry_jitter_factor": 0.2,
    "retry_condition_fn": retry_transient,
}
"""Options of every phase's task, beside `cache_policy=NO_CACHE, persist_result=False`."""
