"""The weight manager that hooks see: each call is a retriable Prefect task on the step's page."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prefect import Task
from prefect.cache_policies import NO_CACHE

from rlcore.checkpoint_engine.base import Replica
from rlcore.checkpoint_engine.manager import CheckpointEngineManager
from rlcore.cluster.executor import require_executor
from rlcore.types import CallKey
from tasks.deadlines import PhaseDeadlines
from tasks.retry import PHASE_OPTIONS, PhaseOptions


def manager_body(
    manager: CheckpointEngineManager, method: str, key: CallKey, args: tuple[Any, ...]
) -> Any:
    """Call one method of the plain manager; shipped to an executor."""
    require_executor(f"checkpoint_manager.{method}")
    return getattr(manager.with_key(key), method)(*args)


MANAGER_RETRY_DELAYS_S: list[float] = [1, 4, 16, 32, 64]
"""Long enough for a replica that was lost to be started again."""

manager_options: PhaseOptions = {
    **PHASE_OPTIONS,
    "retries": len(MANAGER_RETRY_DELAYS_S),
    "retry_delay_seconds": MANAGER_RETRY_DELAYS_S,
}

manager_call = Task(
    manager_body,
    name="update_weights",
    task_run_name="step-{key.global_step:04d}/{method}",
    cache_policy=NO_CACHE,
    persist_result=False,
    **manager_options,
)


class TaskCheckpointManager:
    """Has verl's method names; called from a hook, in the hooks' thread, it waits for the task.

    Pickles as the plain manager, so that the copy of the trainer in an executor holds that one.
    """

    def __init__(
        self,
        manager: CheckpointEngineManager,
        *,
        key: Callable[[str], CallKey],
        deadlines: PhaseDeadlines,
    ) -> None:
        self._manager = manager
        self._key = key
        self._deadlines = deadlines
        self.last_update: dict[str, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._manager,)

    def _call(self, method: str, *args: Any) -> Any:
        deadline_s = self._deadlines.for_phase("update_weights")
        call = manager_call.with_options(name=method, timeout_seconds=deadline_s)
        began = time.monotonic()
        # Against whoever brings a restarted replica up: the body works on a copy of the manager.
        with self._manager.exclusive():
            result = call.submit(self._manager, method, self._key(method), args).result()
        if method == "update_weights":
            self._deadlines.record(method, time.monotonic() - began)
        return result

    def update_weights(self, global_steps: int) -> dict[str, Any]:
        """Publish the trainer's weights to every replica; return what the plain manager does.

        Those that were lost are no members any more, of the driver's manager neither.
        """
        # Whoever waits for the lock is to find what the call has changed: the body had a copy.
        with self._manager.exclusive():
            members = dict(self._manager.replicas)
            self.last_update = self._call("update_weights", global_steps)
            self._manager.drop_lost(members, self.last_update["lost"])
        return self.last_update

    def add_replicas(self, replicas: Mapping[str, Replica]) -> int | None:
        """Bring replicas to the committed version and make them members; return the version."""
        with self._manager.exclusive():
            version = self._call("add_replicas", dict(replicas))
            self._manager.replicas.update(replicas)
        return version

    def remove_replicas(self, names: Iterable[str]) -> None:
        """Leave replicas out of later updates; what they do meanwhile is the caller's affair."""
        self._manager.remove_replicas(names)

    def sleep_replicas(self) -> None:
        """Free the replicas' memory."""
        self._each("sleep_replicas", "sleep")

    def wake_up_replicas(self) -> None:
        """Serve again with the last committed weights."""
        self._each("wake_up_replicas", "wake_up")

    def abort_replicas(self) -> None:
        """Stop all running requests; clients keep what was generated."""
        self._each("abort_replicas", "abort")

    def resume_generation_replicas(self) -> None:
        """Let replicas that were aborted or paused serve again."""
        self._each("resume_generation_replicas", "resume")

    def _each(self, method: str, of_replica: str) -> None:
        with self._manager.exclusive():
            self._call(method)
            self._manager.was_called(of_replica)


def _same(manager: CheckpointEngineManager) -> CheckpointEngineManager:
    return manager
