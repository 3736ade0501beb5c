"""The future of a submitted phase, which works on the flow's loop and in threads."""

import asyncio
import concurrent.futures
from collections.abc import Generator
from typing import Any, TypeVar, cast
from uuid import UUID

from prefect.client.schemas.objects import State
from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.utilities.annotations import quote
from prefect.utilities.collections import StopVisiting, visit_collection

R = TypeVar("R")


class PhaseFuture(PrefectConcurrentFuture[R]):
    """A submitted phase: `await future` on a loop, `future.result()` in a thread.

    `await` returns the body's result or raises what it raised; cancelling the await leaves the
    phase running (the flow's end cancels it).
    """

    def __init__(
        self,
        task_run_id: UUID,
        wrapped_future: "concurrent.futures.Future[Any]",
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(task_run_id, wrapped_future)
        self._loop = loop

    def __await__(self) -> Generator[Any, None, R]:
        return self.aresult().__await__()

    async def aresult(self, raise_on_failure: bool = True) -> R:
        """Wait on a loop and return the body's result; raise what the body raised."""
        await self.wait_async()
        if self._final_state is None:
            return super().result()  # raises what the engine itself failed with
        # result() would hand this to another thread's loop: 1 ms.
        return cast("R", await self._final_state.aresult(raise_on_failure=raise_on_failure))

    async def wait_async(self) -> None:
        """Wait on a loop until the phase has ended, however it ended."""
        if not self.wrapped_future.done():
            await asyncio.wait({asyncio.wrap_future(self.wrapped_future)})
        if self.wrapped_future.exception() is None:
            self._final_state = cast("State[R]", self.wrapped_future.result())

    def wait(self, timeout: float | None = None) -> None:
        """Wait in a thread.

        Raises:
            RuntimeError: called on the flow's loop, which runs the phase and would stand still.
        """
        self._refuse_on_loop("wait()")
        super().wait(timeout)

    def result(self, timeout: float | None = None, raise_on_failure: bool = True) -> R:
        """Return the body's result, waiting for it in a thread.

        Raises:
            RuntimeError: called on the flow's loop before the phase has ended.
            Exception: what the body raised.
        """
        self._refuse_on_loop("result()")
        return super().result(timeout, raise_on_failure)

    def _refuse_on_loop(self, what: str) -> None:
        if not self.wrapped_future.done() and running_loop() is self._loop:
            raise RuntimeError(
                f"{what} of a phase that has not ended would block the flow's event loop, on which "
                "the phase is run: use `await future` (or call it in a thread)"
            )


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop that runs in this thread, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def wait_for_upstreams(inputs: Any) -> None:
    """Wait until all futures in `inputs` have ended, so that the engine's waits do not block."""
    futures: list[PrefectFuture[Any]] = []

    def collect(expr: Any, context: dict[str, Any]) -> Any:
        if isinstance(context.get("annotation"), quote):
            raise StopVisiting
        if isinstance(expr, PrefectFuture):
            futures.append(expr)
        return expr

    visit_collection(inputs, visit_fn=collect, return_data=False, max_depth=-1, context={})
    for future in futures:
        if isinstance(future, PhaseFuture):
            await future.wait_async()
        else:
            await asyncio.to_thread(future.wait)
