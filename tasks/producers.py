"""What a producer subflow does: start one AgentLoopWorker, watch it, restart it, end it.

| waits for            | deadline                | when it is over                             |
|----------------------|-------------------------|---------------------------------------------|
| the worker to start  | `deadlines.start`       | it is killed, another is started            |
| its status           | `deadlines.queue`       | the same                                    |
| a replica's health   | `deadlines.queue`       | ReplicaDiedError: the attempt ends          |
| the ledger's release | `deadlines.start`       | ActorUnavailableError: the attempt ends     |
| the worker to drain  | `run.drain_s`           | it is killed                                |
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlcore.cluster.agent_loop_worker import AgentLoopWorkerHandle
from rlcore.errors import ActorUnavailableError, DeadlineExceededError, ReplicaDiedError

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

    async def run(self) -> dict[str, float]:
        """Keep the worker alive; return its counters at the end, none if it did not drain.

        Raises:
            ActorUnavailableError: the worker died more than MAX_RESTARTS times in a row, or the
                ledger did not take back its prompts.
            ReplicaDiedError: a replica died or does not answer; nobody restarts one while the run
                goes on.
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
        self._run.producer_is_ready(self._index)
        self._log.info("agent loop worker %d is ready", self._index)
        began = reported = time.monotonic()
        while not await self._stopped_within(self._times.poll_s):
            status = await worker.status(deadlines.queue)
            await self._check_replicas()
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

    async def _check_replicas(self) -> None:
        """Ask every replica how it is; the first producer does it for all.

        Raises:
            ReplicaDiedError: its process or its engine died, or it does not answer.
        """
        if self._index != 0:
            return
        deadline_s = self._run.config.deadlines.queue
        for name, replica in self._run.cluster.replicas.items():
            try:
                report = await asyncio.to_thread(replica.health, deadline_s)
            except ActorUnavailableError as error:
                raise ReplicaDiedError(f"{name} died: {error}") from error
            except DeadlineExceededError as error:
                raise ReplicaDiedError(
                    f"rollout producer {self._index} waited {deadline_s:g} s for {name} to say how "
                    f"it is: {error}"
                ) from error
            if report["state"] == "dead":
                # The process lives and answers; its engine raised and serves nobody any more.
                raise ReplicaDiedError(f"{name} is dead: {report['error'] or 'it was closed'}")

    async def _recover(self, worker: AgentLoopWorkerHandle, error: ActorUnavailableError) -> None:
        self._restarts += 1
        self._log.warning("agent loop worker %d died: %s", self._index, error)
        # Whose replicas are dead dies as well, and so would the next one: name the cause.
        await self._check_replicas()
        await self._release(worker)
        if self._restarts > MAX_RESTARTS:
            raise ActorUnavailableError(
                f"agent loop worker {self._index} died {self._restarts} times; last: {error}"
            ) from error
        await self._stopped_within(self._times.backoff_s * 2 ** (self._restarts - 1))

    async def _release(self, worker: AgentLoopWorkerHandle) -> None:
        """Return the dead worker's prompts to pending, waiting for a ledger that is started anew.

        Raises:
            ActorUnavailableError: it did not answer within `deadlines.start`.
        """
        deadline_s = self._run.config.deadlines.start
        ends = time.monotonic() + deadline_s
        while True:
            try:
                await asyncio.to_thread(self._run.cluster.ledger.release_worker, worker.worker_id)
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
