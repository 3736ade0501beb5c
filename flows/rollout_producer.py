"""The long-lived producers: concurrent subflows beside the steps, each supervising one worker."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from prefect import flow, get_run_logger
from prefect.exceptions import TerminationSignal

from rlcore.errors import RolloutError
from tasks.active_run import ActiveRun, active_run
from tasks.producers import Supervisor
from tasks.signals import sigterm_calls

HURRIED_DRAIN_S = 2.0
"""For running sessions when the run is cancelled: everything has to be freed within 25 s."""
KILL_S = 10.0
"""For a worker that has not drained to be killed."""


@flow(
    name="rollout_producer",
    flow_run_name="rollout-producer-{index}",
    retries=0,
    persist_result=False,
)
async def rollout_producer(index: int) -> dict[str, float]:
    """Keep AgentLoopWorker `index` alive until the run stops; return what it produced."""
    return await Supervisor(active_run(), index, get_run_logger()).run()


@contextlib.asynccontextmanager
async def rollout_producers(run: ActiveRun, *, kill_s: float = KILL_S) -> AsyncIterator[None]:
    """Run all producers beside the body, from when they are ready; end them with it.

    A producer that ends before the run does cancels the body, and its error is raised. SIGTERM
    cancels the body, wherever its exception went; producers that it ended are no failure.

    Args:
        run: Whose producers.
        kill_s: For a worker to be killed that has not drained within `run.drain_s`.

    Raises:
        RolloutError: a producer ended without an error of its own.
    """
    body = _Body(run)
    producers = [asyncio.create_task(rollout_producer(i)) for i in range(run.num_producers)]
    for producer in producers:
        producer.add_done_callback(body.producer_ended)
    try:
        with sigterm_calls(body.sigterm):
            await run.wait_producers_ready()
            yield
    except asyncio.CancelledError:
        run.drain_s = HURRIED_DRAIN_S
        run.cluster.begin_end()
        if (error := body.error()) is None:
            raise
        raise error from None
    finally:
        run.stop.set()
        # The drain deadline is the supervisor's; this one is for a supervisor that hangs.
        _, late = await asyncio.wait(producers, timeout=run.drain_s + kill_s)
        for producer in late:
            producer.cancel()
        results = await asyncio.gather(*producers, return_exceptions=True)
        for index, result in enumerate(results):
            if isinstance(result, Exception) and producers[index] not in body.ended:
                get_run_logger().warning(
                    "rollout producer %d failed while the run ended: %r", index, result
                )


class _Body:
    """What runs beside the producers, in the task that makes this; cancelled at most once."""

    def __init__(self, run: ActiveRun) -> None:
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
