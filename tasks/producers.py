"""What a producer subflow does: start one AgentLoopWorker, watch it, restart it, end it."""

import asyncio
import time
from typing import TYPE_CHECKING, Any

from prefect import get_run_logger

from rlcore.cluster.agent_loop_worker import AgentLoopWorkerHandle
from rlcore.errors import ActorUnavailableError

if TYPE_CHECKING:
    from tasks.active_run import ActiveRun

POLL_S = 2.0
REPORT_EVERY_S = 30.0
MAX_RESTARTS = 5
HEALTHY_S = 600.0
"""After so long without a death the restarts are counted from 0 again."""
BACKOFF_S = 1.0
"""Wait before restart k: BACKOFF_S * 2**(k-1), so at most 16 s before the last."""


class Supervisor:
    """Supervises worker `index` of a run, until `run.stop` is set."""

    def __init__(self, run: "ActiveRun", index: int) -> None:
        self._run = run
        self._index = index
        self._log = get_run_logger()
        self._restarts = 0
        self._told: dict[str, Any] = {}

    async def run(self) -> dict[str, float]:
        """Keep the worker alive; return its counters at the end.

        Raises:
            ActorUnavailableError: the worker died more than MAX_RESTARTS times in a row.
            ReplicaDiedError: a replica died and could not be replaced.
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

    async def _watch(self, worker: AgentLoopWorkerHandle) -> dict[str, float]:
        deadlines = self._run.config.deadlines
        await worker.ready(deadlines.start)
        self._told = {}
        self._run.producer_is_ready(self._index)
        self._log.info("agent loop worker %d is ready", self._index)
        began = reported = time.monotonic()
        while not await self._stopped_within(POLL_S):
            status = await worker.status(deadlines.queue)
            await self._tell_replicas(worker)
            if time.monotonic() - reported >= REPORT_EVERY_S:
                reported = time.monotonic()
                self._log.info("%s", status.line())
            if time.monotonic() - began >= HEALTHY_S:
                self._restarts = 0
        return await worker.stop(self._run.drain_s)

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._run.stop.wait()
        except TimeoutError:
            return False
        return True

    async def _tell_replicas(self, worker: AgentLoopWorkerHandle) -> None:
        """Let the worker know which replicas serve, if these are others than before."""
        serving = self._run.cluster.serving()
        if serving != self._told:
            await worker.set_replicas(serving, self._run.config.deadlines.queue)
            self._told = serving

    async def _recover(self, worker: AgentLoopWorkerHandle, error: ActorUnavailableError) -> None:
        self._restarts += 1
        self._log.warning("agent loop worker %d died: %s", self._index, error)
        await asyncio.to_thread(self._run.cluster.ledger.release_worker, worker.worker_id)
        if self._restarts > MAX_RESTARTS:
            raise ActorUnavailableError(
                f"agent loop worker {self._index} died {self._restarts} times; last: {error}"
            ) from error
        await self._stopped_within(BACKOFF_S * 2 ** (self._restarts - 1))
