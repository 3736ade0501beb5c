"""How a cluster's actors end: side by side, and whatever hangs, within one budget of time.

| waits | for | deadline |
|---|---|---|
| run | every end, and what still starts | `budget_s - last_s` |
| run | the last end: Ray's own | `budget_s` |

What is overdue is left behind in its daemon thread and dies with the process. An actor whose start
was cancelled ends as soon as it is made.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rlcore.daemon_thread import in_daemon_thread
from rlcore.errors import TransientError

logger = logging.getLogger(__name__)


class Ends:
    """What is to be done at the end.

    Example:
        >>> ends = Ends(budget_s=20.0, last_s=4.0)
        >>> ends.set_last("Ray", ray.shutdown)
        >>> ends.add("trainer", group.stop)
        >>> await ends.run()
    """

    def __init__(self, *, budget_s: float, last_s: float) -> None:
        """Make an empty list.

        Args:
            budget_s: From `begin`, or from `run`, to the return of `run`, at most.
            last_s: How much of it is kept for the last end.
        """
        self.budget_s = budget_s
        self.last_s = last_s
        self._lock = threading.Lock()
        self._todo: list[tuple[str, Callable[[], Any]]] = []
        self._last: tuple[str, Callable[[], Any]] | None = None
        self._until: float | None = None
        self._is_begun = False
        self._is_over = False

    def add(self, what: str, action: Callable[..., Any], *args: Any) -> None:
        """Do `action(*args)` at the end; from any thread.

        Raises:
            RuntimeError: the ends have begun: `what` is ended already, and its maker should stop.
        """
        with self._lock:
            if not self._is_begun:
                self._todo.append((what, lambda: action(*args)))
                return
            is_over = self._is_over  # then Ray has ended, and `what` with it
        if not is_over:
            _end(what, lambda: action(*args))
        raise RuntimeError(f"{what} was made when everything ended, and is ended")

    def set_last(self, what: str, action: Callable[[], Any]) -> None:
        """Do `action` after all others."""
        with self._lock:
            self._last = (what, action)

    def begin(self) -> None:
        """Let the budget run from now on, if it does not yet."""
        if self._until is None:
            self._until = time.monotonic() + self.budget_s

    async def run(self, starting: Mapping[asyncio.Future[Any], str] | None = None) -> None:
        """End everything; a repeat does nothing more.

        Args:
            starting: What may still make something, with its name; its errors are dropped.

        Raises:
            Exception: what an end raised besides a TransientError, after all have been done.
        """
        self.begin()
        until = self._until or 0.0
        with self._lock:
            self._is_begun = True
            todo, self._todo = self._todo, []
        ends = {_in_thread(what, action): f"the end of the {what}" for what, action in todo}
        errors: list[BaseException] = []
        try:
            late = {**(starting or {}), **ends}
            done = await _wait(late, until - self.last_s)
            errors = [e for end in ends if end in done and (e := end.exception())]
        finally:
            with self._lock:
                self._is_over = True
                last, self._last = self._last, None
            if last is not None:
                what, action = last
                done = await _wait({_in_thread(what, action): f"the end of {what}"}, until)
                errors += [e for end in done if (e := end.exception())]
        if errors:
            raise errors[0]


def _end(what: str, action: Callable[[], Any]) -> None:
    """End something; a process that is dead already is what was wanted."""
    try:
        action()
    except TransientError as error:
        logger.warning("ending the %s: %s", what, error)


def _in_thread(what: str, action: Callable[[], Any]) -> asyncio.Future[None]:
    return asyncio.wrap_future(in_daemon_thread(_end, what, action, name=f"end of {what}"))


async def _wait(jobs: Mapping[asyncio.Future[Any], str], until: float) -> set[asyncio.Future[Any]]:
    """Wait for all jobs until a time; return those that are done, and name the others."""
    if not jobs:
        return set()
    within_s = max(0.0, until - time.monotonic())
    done, late = await asyncio.wait(jobs, timeout=within_s)
    for job in late:
        logger.warning("%s takes longer than %.0f s and is not waited for", jobs[job], within_s)
        job.cancel()
    for job in done:
        if not job.cancelled():
            job.exception()  # seen: who started it is gone
    return done
