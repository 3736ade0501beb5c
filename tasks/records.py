"""Keeps a fast run from outrunning Prefect's server, which drops what it has no room for.

Task runs are recorded from events. A server that cannot follow keeps some thousands of them and
then loses the rest, so a run waits while what it did WINDOW task runs ago is not recorded yet.

    catch_up   waits for: the record of one task run; at most PATIENCE_S, whatever the server
               answers or does not, since what is shown never ends a run
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound

logger = logging.getLogger(__name__)

WINDOW = 1_000
"""Task runs, of three events each; the server has room for 10,000 events."""
STRIDE = 200
"""Task runs between two looks, so that looking costs nothing."""
PATIENCE_S = 30.0
POLL_S = 0.5


async def is_recorded(task_run_id: UUID) -> bool:
    """Say whether the server knows the end of a task run."""
    async with get_client() as client:
        try:
            task_run = await client.read_task_run(task_run_id)
        except ObjectNotFound:
            return False
    return task_run.state is not None and task_run.state.is_final()


class RecordWindow:
    """The task runs of an attempt that its server may not have recorded yet.

    Args:
        look: Says whether one is recorded.
        patience_s: Longest wait; then the record is taken for lost, and the window begins anew.
    """

    def __init__(
        self,
        look: Callable[[UUID], Awaitable[bool]] = is_recorded,
        *,
        patience_s: float = PATIENCE_S,
        poll_s: float = POLL_S,
    ) -> None:
        self._look = look
        self._patience_s = patience_s
        self._poll_s = poll_s
        self._ended: deque[UUID] = deque()
        self._last_error = ""

    def note(self, task_run_id: UUID) -> None:
        """Remember a task run that has ended."""
        self._ended.append(task_run_id)

    async def catch_up(self) -> None:
        """Wait until no more than WINDOW task runs can be without a record."""
        if len(self._ended) < WINDOW:
            return
        oldest = [self._ended.popleft() for _ in range(STRIDE)][-1]
        try:
            async with asyncio.timeout(self._patience_s):
                await self._until_recorded(oldest)
        except TimeoutError:
            logger.warning(
                "Prefect's server has not recorded task run %s within %g s%s",
                oldest, self._patience_s, self._last_error,
            )  # fmt: skip
            self._ended.clear()

    async def _until_recorded(self, task_run_id: UUID) -> None:
        self._last_error = ""
        while True:
            try:
                if await self._look(task_run_id):
                    return
            except Exception as error:  # noqa: BLE001  # whatever a server that is ill answers
                self._last_error = f" (last asked: {type(error).__name__}: {error})"
            await asyncio.sleep(self._poll_s)
