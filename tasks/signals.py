"""SIGTERM reaches Python although Ray has a handler of its own, and ends the run wherever it lands.

Prefect handles SIGTERM in Python. Starting Ray replaces the process's handler below Python by one
that prints a stack and dies: the run would leave no outcome and free nothing. Setting the handler
that Python believes to be installed once more puts it back.

Prefect's handler raises in whatever the main thread executes just then: the run's own task, but as
well a producer's, a background task whose errors nobody awaits, or a callback of the event loop,
which logs the exception and goes on. So the loop is told of the signal besides, by its wakeup file
descriptor, to which Python writes whichever handler is installed.
"""

import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator

EVERY_S = 0.25


def restore_sigterm() -> None:
    """Put Python's handler of SIGTERM back; outside the main thread, nothing can be done."""
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None:
        signal.signal(signal.SIGTERM, handler)


@contextlib.asynccontextmanager
async def sigterm_kept() -> AsyncIterator[None]:
    """Keep Python's handler while the body starts Ray in another thread."""

    async def keep() -> None:
        while True:
            restore_sigterm()
            await asyncio.sleep(EVERY_S)

    keeper = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeper.cancel()
        restore_sigterm()


@contextlib.contextmanager
def sigterm_calls(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` in the running event loop when SIGTERM arrives while the body runs.

    It comes after the installed handler, which stays; outside the main thread, nothing can be done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    handler = signal.getsignal(signal.SIGTERM)
    loop.add_signal_handler(signal.SIGTERM, action)
    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        handler = signal.getsignal(signal.SIGTERM)
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, handler)
