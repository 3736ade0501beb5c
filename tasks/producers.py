"""What a producer subflow does: start one AgentLoopWorker, watch it, restart it, end it.

| waits for            | deadline                | when it is over                             |
|----------------------|-------------------------|---------------------------------------------|
| the worker to start  | `deadlines.start`       | it is killed, another is started            |
| its status           | `deadlines.queue`       | the same                                    |
| the ledger's release | `deadlines.start`       | ActorUnavailableError: the attempt ends     |
| the worker to drain  | `run.drain_s`           | it is killed                                |
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prefect.exceptions import TerminationSignal

from rlcore.cluster.agent_loop_worker import AgentLoopWorkerHandle
from rlcore.errors import (
    ActorUnavailableError,
    DeadlineExceededError,
    NoReplicaError,
    RolloutError,
)

if TYPE_CHECKING:
    from tasks.active_run import ActiveRun

MAX_RESTARTS = 5
"""Deaths in a row that are made good; the next one ends the attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorTimes:
    """Rhythm of a supervisor, in seconds; tests use shorter ones."""

    poll_s: float = 2.0
    """Between two looks at worker and replicas."""
    report_every_s: float = 30.0
    """Between two lines about the worker in the log."""
    healthy_s: float = 600.0
    """After so long without a death the restarts are counted from 0 again."""
    backoff_s: float = 1.0
    """Wait before restart k: backoff_s * 2**(k-1), so at most 16 s before the last."""
    ledger_retry_s: float = 1.0
    """Wait before a ledger that did not answer is asked again."""


class Supervisor:
    """Supervises worker `index` of a run, until `run.stop` is set.

    Example:
        >>> totals = await Supervisor(active_run(), 0, get_run_logger()).run()
    """

    def __init__(
        self,
        run: "ActiveRun",
        index: int,
        log: "logging.Logger | logging.LoggerAdapter[Any]",
        times: SupervisorTimes | None = None,
    ) -> None:
        self._run = run
        self._index = index
        self._log = log
        self._times = times or SupervisorTimes()
        self._restarts = 0
        self._told: dict[str, Any] = {}

    async def run(self) -> dict[str, float]:
        """Keep the worker alive; return its counters at the end, none if it did not drain.

        Raises:
            ActorUnavailableError: the worker died more than MAX_RESTARTS times in a row, or the
                ledger did not take back its prompts.
            ReplicaDiedError: a replica was lost and could not be replaced.
        """
        while True:
            worker = self._run.cluster.new_agent_loop_worker(self._index)
            try:
                return await self._watch(worker)
            except ActorUnavailableError as error:
                failure = error
            finally:
                # Before its prompts are released: a hung worker that wakes up writes no row then.
                await asyncio.to_thread(worker.kill)
            if self._run.stop.is_set():
                self._log.warning("agent loop worker %d did not drain: %s", self._index, failure)
                return {}
            await self._recover(worker, failure)
            if self._run.stop.is_set():
                return {}

    async def _watch(self, worker: AgentLoopWorkerHandle) -> dict[str, float]:
        deadlines = self._run.config.deadlines
        await worker.ready(deadlines.start)
        self._told = {}
        self._run.producer_is_ready(self._index)
        self._log.info("agent loop worker %d is ready", self._index)
        began = reported = time.monotonic()
        while not await self._stopped_within(self._times.poll_s):
            status = await worker.status(deadlines.queue)
            await self._tell_replicas(worker, set(status.in_flight))
            if time.monotonic() - reported >= self._times.report_every_s:
                reported = time.monotonic()
                self._log.info("%s", status.line())
            if time.monotonic() - began >= self._times.healthy_s:
                self._restarts = 0
        return await worker.stop(self._run.drain_s)

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._run.stop.wait()
        except TimeoutError:
            return False
        return True

    async def _tell_replicas(self, worker: AgentLoopWorkerHandle, known: set[str]) -> None:
        """Let the worker know which replicas serve, if these are others than before.

        Or others than it sends requests to: a worker leaves out one that failed it, which may be
        there all the same.

        Args:
            worker: Whom to tell.
            known: Names of those that the worker sends requests to.

        Raises:
            ReplicaDiedError: one was lost and could not be replaced.
        """
        serving = self._run.cluster.serving()
        if serving != self._told or serving.keys() != known:
            await worker.set_replicas(serving, self._run.config.deadlines.queue)
            self._told = serving

    async def _recover(self, worker: AgentLoopWorkerHandle, error: ActorUnavailableError) -> None:
        self._restarts += 1
        self._log.warning("agent loop worker %d died: %s", self._index, error)
        # Whose replicas are lost for good dies as well, and so would the next one: name the cause.
        self._run.cluster.serving()
        # Prompts that wait for a replica are not what ended the worker.
        await self._release(worker, is_blameless=isinstance(error, NoReplicaError))
        if self._restarts > MAX_RESTARTS:
            raise ActorUnavailableError(
                f"agent loop worker {self._index} died {self._restarts} times; last: {error}"
            ) from error
        await self._stopped_within(self._times.backoff_s * 2 ** (self._restarts - 1))

    async def _release(self, worker: AgentLoopWorkerHandle, *, is_blameless: bool) -> None:
        """Return the dead worker's prompts to pending, waiting for a ledger that is started anew.

        Args:
            worker: The dead one.
            is_blameless: Whether these claims do not count against its prompts.

        Raises:
            ActorUnavailableError: it did not answer within `deadlines.start`.
        """
        deadline_s = self._run.config.deadlines.start
        ends = time.monotonic() + deadline_s
        release = self._run.cluster.ledger.release_worker
        while True:
            try:
                await asyncio.to_thread(release, worker.worker_id, is_blameless)
            except (ActorUnavailableError, DeadlineExceededError) as error:
                if time.monotonic() + self._times.ledger_retry_s > ends:
                    raise ActorUnavailableError(
                        f"rollout producer {self._index} waited {deadline_s:g} s for the ledger to "
                        f"take back the prompts of {worker.worker_id}; last: {error}"
                    ) from error
                self._log.warning("the ledger is asked again: %s", error)
            else:
                return
            if await self._stopped_within(self._times.ledger_retry_s):
                return


class ProducedBody:
    """What runs beside the producers, in the task that makes this; cancelled at most once."""

    def __init__(self, run: "ActiveRun") -> None:
        self.ended: list[asyncio.Task[dict[str, float]]] = []
        """Producers that ended before the run did."""
        self._run = run
        self._task = asyncio.current_task()

    def producer_ended(self, producer: asyncio.Task[dict[str, float]]) -> None:
        """Cancel the body unless the run is over."""
        if not self._run.stop.is_set():
            self.ended.append(producer)
            self._cancel()

    def sigterm(self) -> None:
        """Cancel the body unless the run is over."""
        if not self._run.stop.is_set():
            self._cancel()

    def error(self) -> BaseException | None:
        """Return the error of the producer that ended the body; None: it was no producer.

        Nothing here cancels a producer before the run is over, so one that was cancelled, or got
        the signal's exception, ended because the process was asked to end.
        """
        if self._task is None or not self.ended or self.ended[0].cancelled():
            return None
        error = self.ended[0].exception()
        if isinstance(error, TerminationSignal):
            return None
        self._task.uncancel()
        return error or RolloutError("a rollout producer ended before the run did")

    def _cancel(self) -> None:
        # Once: what frees things must not be cancelled again.
        if self._task is not None and not self._task.cancelling():
            self._task.cancel()
