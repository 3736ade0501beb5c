"""Work in threads that may hang: the end of the process does not wait for them.

Python joins every other thread when it exits, those of executors and of `asyncio.to_thread` too.
"""

import concurrent.futures
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThread:
    """One daemon thread: calls run in it one after the other, and it lives until `close`.

    For what may not be done by a thread that ends: Linux takes the end of a thread for the death of
    the parent, and kills the processes that it started to die with it. Ray's own are such.

    Example:
        >>> thread = DaemonThread("hooks")
        >>> waiting = asyncio.wrap_future(thread.submit(trainer.on_step_end))
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[..., T], *args: Any) -> "concurrent.futures.Future[T]":
        """Run `call(*args)` after those before, in a copy of this context; return its future.

        Args:
            call: What to run; it cannot be interrupted.
            *args: Its parameters.
        """
        future, work = _prepared(call, args)
        self._calls.put(work)
        return future

    def close(self) -> None:
        """Let the thread end after its calls; does not wait for them."""
        self._calls.put(None)

    def _run(self) -> None:
        while (work := self._calls.get()) is not None:
            work()


def in_daemon_thread(
    call: Callable[..., T], *args: Any, name: str
) -> "concurrent.futures.Future[T]":
    """Run `call(*args)` in a daemon thread of its own, in a copy of this context.

    Args:
        call: What to run; it cannot be interrupted.
        *args: Its parameters.
        name: Of the thread.
    """
    future, work = _prepared(call, args)
    threading.Thread(target=work, name=name, daemon=True).start()
    return future


def _prepared(
    call: Callable[..., T], args: tuple[Any, ...]
) -> "tuple[concurrent.futures.Future[T], Callable[[], None]]":
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # so that who stops waiting cannot cancel it
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(call, *args)
        except BaseException as error:  # noqa: BLE001 - raised where the future is waited for
            future.set_exception(error)
        else:
            future.set_result(result)

    return future, work
