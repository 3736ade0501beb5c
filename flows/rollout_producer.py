"""The long-lived producers: concurrent subflows beside the steps, each supervising one worker."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from prefect import flow, get_run_logger

from rlcore.errors import RolloutError
from tasks.active_run import ActiveRun, active_run
from tasks.producers import Supervisor

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

    A producer that ends before the run does cancels the body, and its error is raised.

    Args:
        run: Whose producers.
        kill_s: For a worker to be killed that has not drained within `run.drain_s`.

    Raises:
        RolloutError: a producer ended without an error of its own.
    """
    body = asyncio.current_task()
    ended: list[asyncio.Task[dict[str, float]]] = []

    def on_end(producer: asyncio.Task[dict[str, float]]) -> None:
        if not run.stop.is_set():
            ended.append(producer)
            if body is not None:
                body.cancel()

    producers = [asyncio.create_task(rollout_producer(i)) for i in range(run.num_producers)]
    for producer in producers:
        producer.add_done_callback(on_end)
    try:
        await run.wait_producers_ready()
        yield
    except asyncio.CancelledError:
        run.drain_s = HURRIED_DRAIN_S
        run.cluster.begin_end()
        if not ended or body is None:
            raise
        body.uncancel()
        error = None if ended[0].cancelled() else ended[0].exception()
        raise error or RolloutError("a rollout producer ended before the run did") from None
    finally:
        run.stop.set()
        # The drain deadline is the supervisor's; this one is for a supervisor that hangs.
        _, late = await asyncio.wait(producers, timeout=run.drain_s + kill_s)
        for producer in late:
            producer.cancel()
        results = await asyncio.gather(*producers, return_exceptions=True)
        for index, result in enumerate(results):
            if isinstance(result, Exception) and producers[index] not in ended:
                get_run_logger().warning(
                    "rollout producer %d failed while the run ended: %r", index, result
                )
