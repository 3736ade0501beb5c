"""What a producer subflow does: start one AgentLoopWorker, watch it, restart it, end it."""

import asyncio
from typing import TYPE_CHECKING

from prefect import get_run_logger

from rlcore.cluster.agent_loop_worker import AgentLoopWorkerHandle
from rlcore.errors import ActorUnavailableError, RolloutError

if TYPE_CHECKING:
    from tasks.lifecycle import ActiveRun

POLL_S = 2.0
REPORT_EVERY_S = 30.0
MAX_RESTARTS = 5
BACKOFF_S = 1.0
"""Wait before restart k: BACKOFF_S * 2**(k-1), so at most 16 s before the last."""


class Supervisor:
    """Supervises worker `index` of a run, until `run.stop` is set."""

    def __init__(self, run: "ActiveRun", index: int) -> None:
        self._run = run
        self._index = index
        self._log = get_run_logger()
        self._restarts = 0

    async def run(self) -> dict[str, float]:
        """Keep the worker alive; return its counters at the end.

        Raises:
            RolloutError: the worker died more than MAX_RESTARTS times, or its sessions fail more
                often than `reward.max_failure_ratio` allows.
        """
        while True:
            worker = self._run.cluster.new_agent_loop_worker(self._index)
            try:
                return await self._watch(worker)
            except ActorUnavailableError as error:
                await self._recover(worker, error)
            finally:
                await asyncio.to_thread(worker.kill)

    async def _watch(self, worker: AgentLoopWorkerHandle) -> dict[str, float]:
        await worker.ready(self._run.config.deadlines.start)
        self._run.producer_is_ready(self._index)
        self._log.info("agent loop worker %d is ready", self._index)
        silent_s = 0.0
        while not self._run.stop.is_set():
            with_timeout = asyncio.wait_for(self._run.stop.wait(), timeout=POLL_S)
            await asyncio.gather(with_timeout, return_exceptions=True)
            status = await worker.status(self._run.config.deadlines.queue)
            silent_s += POLL_S
            if silent_s >= REPORT_EVERY_S:
                silent_s = 0.0
                self._log.info("%s", status.line())
        return await worker.stop(self._run.config.deadlines.drain)

    async def _recover(self, worker: AgentLoopWorkerHandle, error: ActorUnavailableError) -> None:
        self._restarts += 1
        self._log.warning("agent loop worker %d died: %s", self._index, error)
        self._run.cluster.ledger.release_worker(worker.worker_id)
        if self._restarts > MAX_RESTARTS:
            raise RolloutError(
                f"agent loop worker {self._index} died {self._restarts} times; last: {error}"
            ) from error
        await asyncio.sleep(BACKOFF_S * 2 ** (self._restarts - 1))
