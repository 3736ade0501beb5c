"""A deadline that stands still while what it bounds waits for something that is not its own fault.

A session has `deadlines.session` for its own work: seconds in which no replica serves do not count.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self


class PausableTimeout:
    """`asyncio.timeout` with pauses, for one task and those that it starts.

    Example:
        >>> async with PausableTimeout(600.0) as deadline:
        ...     with deadline.paused():
        ...         await somebody_else()
    """

    def __init__(self, seconds: float) -> None:
        self._timeout = asyncio.timeout(seconds)
        self._num_pauses = 0
        self._left_s = 0.0
        self._is_over = False

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self._is_over = True
        return await self._timeout.__aexit__(error_type, error, traceback)

    def expired(self) -> bool:
        """Whether the time has run out."""
        return self._timeout.expired()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let the time stand still during the block; blocks may overlap."""
        self._num_pauses += 1
        if self._num_pauses == 1 and self._runs():
            ends = self._timeout.when()
            assert ends is not None  # only a pause takes it away
            self._left_s = ends - asyncio.get_running_loop().time()
            self._timeout.reschedule(None)
        try:
            yield
        finally:
            self._num_pauses -= 1
            if self._num_pauses == 0 and self._runs():
                self._timeout.reschedule(asyncio.get_running_loop().time() + self._left_s)

    def _runs(self) -> bool:
        # A task that the session started may still wait when the session is over.
        return not self._is_over and not self._timeout.expired()
