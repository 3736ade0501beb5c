"""SIGTERM reaches Python although Ray has a handler of its own.

Prefect handles SIGTERM in Python. Starting Ray replaces the process's handler below Python by one
that prints a stack and dies: the run would leave no outcome and free nothing. Setting the handler
that Python believes to be installed once more puts it back.
"""

import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncIterator

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
