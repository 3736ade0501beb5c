"""The long-lived producers: concurrent subflows beside the steps, each supervising one worker."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from prefect import flow, get_run_logger
from prefect.exceptions import TerminationSignal

from tasks.active_run import ActiveRun, active_run
from tasks.producers import ProducedBody, Supervisor
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
    body = ProducedBody(run)
    producers = [asyncio.create_task(rollout_producer(i)) for i in range(run.num_producers)]
    for producer in producers:
        producer.add_done_callback(body.producer_ended)
    try:
        with sigterm_calls(body.sigterm):
            await run.wait_producers_ready()
            yield
    except (asyncio.CancelledError, TerminationSignal):
        # The signal's exception itself where the body's own code was running.
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
