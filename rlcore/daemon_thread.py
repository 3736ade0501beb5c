"""Work in a thread of its own that may hang: the end of the process does not wait for it.

Python joins every other thread when it exits, those of executors and of `asyncio.to_thread` too.
"""

import concurrent.futures
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def in_daemon_thread(
    call: Callable[..., T], *args: Any, name: str
) -> "concurrent.futures.Future[T]":
    """Run `call(*args)` in a daemon thread, in a copy of this context; return its future.

    Args:
        call: What to run; it cannot be interrupted.
        *args: Its parameters.
        name: Of the thread.

    Example:
        >>> waiting = asyncio.wrap_future(in_daemon_thread(trainer.on_step_end, name="hook"))
    """
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

    threading.Thread(target=work, name=name, daemon=True).start()
    return future
