"""A training group that lost a rank is started anew within the attempt, and the phase goes on.

    phase fails with TrainingGroupLostError → new group ← snapshot N-1 → the step's phases that had
    changed the group, again → the phase, again

The new group takes the place of the old one (`TrainingGroup.become`), so that the trainer, the
weight manager and the next copies of both have it. What phases left in the queue and in the
trainer's state is still there: of a repeated phase only what it does to the group counts.

| waits | for | deadline |
|---|---|---|
| restore | the old group's death, the new one's model and state | those of the group's calls |
| restore | repeated phases | theirs |
| a hook's call on the weight manager | all of that | `RESTORE_FACTOR` x `deadlines.start` |
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from rlcore.cluster.training_worker import TrainingGroup
from rlcore.errors import DeadlineExceededError, RankDisagreementError, TrainingGroupLostError
from rlcore.trainer.checkpoint import Checkpoint
from rlcore.trainer.phases import SAVE_SNAPSHOT, Phase
from rlcore.types import BatchRef, CallKey

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOST = (TrainingGroupLostError, RankDisagreementError)
"""Errors after which all ranks go back to one snapshot."""

MAX_RESTARTS = 3
"""Of one step; a group that dies again and again ends the attempt."""

RESTORE_FACTOR = 4
"""Start of a group, loading, and phases of a step, in starts of an actor."""

TRIES = 1000
"""More than any phase has: tries after a restart are counted on from there, so that collaborators
that have seen the earlier ones admit them."""

Redo = tuple[Phase, BatchRef | None, int]
"""A phase, its batch, and its inner step."""


class TrainingCluster(Protocol):
    """What holds the training group."""

    training: TrainingGroup

    def restart_training(self) -> None:
        """Put a new group in the place of the lost one."""
        ...


class TrainingRecovery:
    """Brings the training group back.

    Args:
        cluster: Holds the group.
        saved: Returns the snapshot or checkpoint of a step; None: there is none.
        key: Names the caller of a phase.
        redo: Runs a phase again and drops its result.
        is_enabled: Off: a lost group ends the attempt.

    Example:
        >>> result = await recovery.guard(lambda: submit(phase))
    """

    def __init__(
        self,
        cluster: TrainingCluster,
        *,
        saved: Callable[[int], Checkpoint | None],
        key: Callable[[str], CallKey],
        redo: Callable[[Phase, BatchRef | None, int], Awaitable[object]],
        is_enabled: bool,
        start_s: float,
    ) -> None:
        self._cluster = cluster
        self._saved = saved
        self._key = key
        self._redo = redo
        self._is_enabled = is_enabled
        self._wait_s = RESTORE_FACTOR * start_s
        self._done: list[Redo] = []
        self._step = 0
        self._restarts_of_step = 0
        self.restarts = 0
        """Of this attempt."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The flow's, for calls from the hooks' thread."""

    def begin_at(self, step: int) -> None:
        """The group has the state at the end of this step, which is saved or will be next."""
        self._step, self._done, self._restarts_of_step = step, [], 0

    def note(self, phase: Phase, batch: BatchRef | None, inner_step: int, step: int) -> None:
        """Remember a phase that has succeeded."""
        if phase == SAVE_SNAPSHOT:
            self.begin_at(step)
        elif phase.is_in_training_group:
            self._done.append((phase, batch, inner_step))

    @property
    def first_try(self) -> int:
        """Number of a phase's first try: later ones than before a restart are."""
        return 1 + TRIES * self.restarts

    async def guard(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work`; when the group is lost meanwhile, restore it and do it again.

        Raises:
            TrainingGroupLostError, RankDisagreementError: it cannot be restored.
            Exception: whatever else `work` or the new group's start raised.
        """
        while True:
            try:
                return await work()
            except LOST as error:
                await self.restore(error)

    def restore_from_thread(self, error: Exception) -> None:
        """Restore from a thread other than the flow's, and wait for it.

        Raises:
            DeadlineExceededError: it takes too long.
            Exception: see `restore`.
        """
        assert self.loop is not None, "hooks run while a flow's loop waits for them"
        future = asyncio.run_coroutine_threadsafe(self.restore(error), self.loop)
        try:
            future.result(timeout=self._wait_s)
        except TimeoutError as overdue:
            if not future.done():
                future.cancel()
                raise DeadlineExceededError(
                    f"the training group was not restored within {self._wait_s:g} s, after: {error}"
                ) from overdue
            raise

    async def restore(self, error: Exception) -> None:
        """Start the group anew and bring it to where the step was.

        Raises:
            TrainingGroupLostError, RankDisagreementError: snapshots are off, there is none here, or
                the group was lost MAX_RESTARTS times in this step.
            Exception: the new group cannot be started, or a phase cannot be repeated.
        """
        while True:
            saved = self._base(error)
            who_died = str(error).partition("\n")[0]  # Ray adds what it knows of the process
            logger.warning(
                "%s; the group is started anew from %s, %d phases of the step are repeated",
                who_died, saved.path, len(self._done),
            )  # fmt: skip
            try:
                await self._rebuild(saved)
            except LOST as again:
                error = again
            else:
                logger.info("the training group is back (restart %d)", self.restarts)
                return

    def _base(self, error: Exception) -> Checkpoint:
        saved = self._saved(self._step) if self._is_enabled else None
        if saved is None or self._restarts_of_step >= MAX_RESTARTS:
            raise error
        self._restarts_of_step += 1
        self.restarts += 1
        return saved

    async def _rebuild(self, saved: Checkpoint) -> None:
        await asyncio.to_thread(self._cluster.restart_training)
        training, key = self._cluster.training, self._key("restore_training")
        await asyncio.to_thread(training.load_checkpoint, key, saved.actor_path)
        # The segment went with the old group; a replica that joins in this step needs its weights.
        await asyncio.to_thread(training.publish_weights, key)
        for phase, batch, inner_step in self._done:
            await self._redo(phase, batch, inner_step)
