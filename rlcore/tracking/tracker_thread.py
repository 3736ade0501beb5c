"""A tracker in a thread of its own: whatever it waits for, the run does not.

| waits for | unblocked by | deadline |
|---|---|---|
| the next call | `call` | none: a daemon thread, which ends with the process |
| `settled`: the calls so far | the tracker | the caller's; an overdue tracker is switched off |
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """One place for metrics."""

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Write one step's metrics."""

    def finish(self) -> None:
        """Flush and close."""


class TrackerThread:
    """Opens a tracker and makes its calls, one after the other.

    Args:
        name: As in `trainer.logger`.
        open_tracker: Makes the tracker; called in the thread, since it may wait for a server.
        tell: Gets the one sentence that says why the tracker was switched off.

    Attributes:
        name: As given.
        is_open: Whether the tracker exists; it may take longer to open than to log.
        is_off: Whether it was switched off or closed; it gets no calls any more.
        began: When it was started, by the monotonic clock.
    """

    def __init__(
        self, name: str, open_tracker: Callable[[], Tracker], tell: Callable[[str], None]
    ) -> None:
        self.name = name
        self.is_open = False
        self.is_off = False
        self.began = time.monotonic()
        self._tell = tell
        self._switch = threading.Lock()
        self._calls: queue.SimpleQueue[tuple[Callable[[Tracker], None], Future[None]]]
        self._calls = queue.SimpleQueue()
        self._last: Future[None] = Future()
        self._last.set_result(None)
        thread = threading.Thread(
            target=self._work, args=(open_tracker,), name=f"tracker-{name}", daemon=True
        )
        thread.start()

    def call(self, action: Callable[[Tracker], None]) -> None:
        """Have one more call made, after those that were given before; returns at once."""
        with self._switch:
            if self.is_off:
                return
            self._last = Future()
            self._last.set_running_or_notify_cancel()  # who stops waiting for it leaves it be
            self._calls.put((action, self._last))

    def close(self) -> None:
        """Have the tracker finished and the thread ended, after the calls so far."""

        def finish(tracker: Tracker) -> None:
            tracker.finish()
            self.is_off = True

        self.call(finish)

    def switch_off(self, reason: str) -> None:
        """Make no further call, and say why; a tracker is switched off once."""
        with self._switch:
            if self.is_off:
                return
            self.is_off = True
        self._tell(f"tracker {self.name} is switched off: {reason}")

    def last_call(self) -> Future[None]:
        """Return what is done when every call so far is, or when the tracker is off."""
        return self._last

    def _work(self, open_tracker: Callable[[], Tracker]) -> None:
        try:
            tracker = open_tracker()
            self.is_open = True
            while not self.is_off:
                action, done = self._calls.get()
                try:
                    action(tracker)
                finally:
                    done.set_result(None)
        except Exception as error:  # whatever a third party's tracker raises, the run goes on
            logger.exception("tracker %s failed and is switched off for this run", self.name)
            self.switch_off(repr(error))
        with self._switch:
            while not self._calls.empty():
                self._calls.get()[1].set_result(None)


async def settled(threads: Sequence[TrackerThread], deadline_s: float) -> list[TrackerThread]:
    """Wait until trackers have made the calls that they were given; return those that have not.

    Args:
        threads: Which.
        deadline_s: Seconds, for all together.
    """
    waits = {asyncio.wrap_future(thread.last_call()): thread for thread in threads}
    if not waits:
        return []
    try:
        _, overdue = await asyncio.wait(waits, timeout=deadline_s)
    finally:
        for wait in waits:
            wait.cancel()
    return [waits[wait] for wait in overdue]
