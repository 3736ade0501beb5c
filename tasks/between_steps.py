"""What happens between two steps and never inside one: pause, suspend, outage, time limit.

| waits for | unblocked by | deadline |
|---|---|---|
| a Prefect server that answers | the server | trainer.prefect_outage_s |
| a paused run to be resumed | a person, in the UI | the pause's own timeout |
| the worker to end a run that is cancelled | the worker; none that lost its server | WORKER_S |
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator
from uuid import UUID

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext, SettingsContext, get_settings_context
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, Settings, temporary_settings

from rlcore.errors import DeadlineExceededError, RolloutError

logger = logging.getLogger(__name__)

POLL_S = 1.0
HEALTH_S = 5.0
"""For one answer of the server."""

WORKER_S = 12.0
"""A worker ends a cancelled run within 10 s. One whose server was away ends none that it started
before: Prefect's observer gives up after some twenty seconds, and does not come back."""

PAGE_S = 5.0
"""A page of `steps_per_page: auto` takes about this long, so that a page costs the run little."""

MAX_AUTO_STEPS = 100
MAX_AUTO_PAGES = 1_000
"""The UI draws that many at once; its graph ends at 10,000 nodes."""


class BetweenSteps:
    """The gate before every step, and the clock of the attempt.

    Args:
        flow_run_id: The flow run of the attempt; None: nobody can pause it.
        outage_s: `trainer.prefect_outage_s`.
        max_wall_s: `trainer.max_wall_s`.
        worker_s: How long a worker has to end a cancelled run, before it ends by itself.
    """

    def __init__(
        self,
        *,
        flow_run_id: str | None,
        outage_s: float,
        max_wall_s: float | None,
        worker_s: float = WORKER_S,
    ) -> None:
        self._flow_run_id = None if flow_run_id is None else UUID(flow_run_id)
        self._outage_s = outage_s
        self._worker_s = worker_s
        self._ends = math.inf if max_wall_s is None else time.monotonic() + max_wall_s

    @property
    def is_time_over(self) -> bool:
        """Whether `max_wall_s` has passed."""
        return time.monotonic() >= self._ends

    async def wait_for_server(self) -> None:
        """Wait until Prefect's server answers.

        Raises:
            DeadlineExceededError: it did not within `prefect_outage_s`.
        """
        ends: float | None = None
        while (error := await _health_error()) is not None:
            now = time.monotonic()
            if ends is None:
                ends = now + self._outage_s
                logger.warning("Prefect's server does not answer: %s", error)
            if now >= ends:
                raise DeadlineExceededError(
                    f"waited {self._outage_s:.0f} s (trainer.prefect_outage_s) for Prefect's "
                    f"server: {error}"
                )
            await asyncio.sleep(POLL_S)

    async def gate(self) -> State | None:
        """Wait while the run is paused; return the state of a run that is suspended, else None.

        Raises:
            DeadlineExceededError: the server did not answer in time.
            RolloutError: the pause ran out, or the run was ended from outside.
            CancelledError: the run is cancelled, and no worker has ended it.
        """
        await self.wait_for_server()
        if self._flow_run_id is None:
            return None
        said = False
        while (state := await self._state()) is not None and state.type == StateType.PAUSED:
            if is_suspension(state):
                return state
            if not said:
                logger.warning("paused; resume it in the UI")
                said = True
            await asyncio.sleep(POLL_S)
        if state is not None and state.is_cancelling():
            logger.warning("cancelled; the run ends by itself unless its worker ends it")
            await asyncio.sleep(self._worker_s)
            raise asyncio.CancelledError
        if state is not None and state.is_final():
            raise RolloutError(f"the run was ended from outside: {state.name}: {state.message}")
        return None

    async def _state(self) -> State | None:
        assert self._flow_run_id is not None
        async with _client() as client:
            return (await client.read_flow_run(self._flow_run_id)).state


def is_suspension(state: State) -> bool:
    """Say whether a paused run is to leave its process and be started again."""
    return bool(state.state_details.pause_reschedule) or state.name == "Suspended"


async def _health_error() -> Exception | None:
    with _one_try():
        try:
            async with asyncio.timeout(HEALTH_S), _client() as client:
                return await client.api_healthcheck()
        except TimeoutError as error:
            return error


def _one_try() -> SettingsContext:
    """Return settings by which a request is sent once; `temporary_settings` takes 60 ms a time."""
    context = get_settings_context()
    return SettingsContext(profile=context.profile, settings=_without_retries(context))


_derived: tuple[Settings, Settings] | None = None


def _without_retries(context: SettingsContext) -> Settings:
    global _derived
    if _derived is None or _derived[0] is not context.settings:
        changed = context.settings.copy_with_update(updates={PREFECT_CLIENT_MAX_RETRIES: 0})
        _derived = context.settings, changed
    return _derived[1]


@contextlib.asynccontextmanager
async def _client() -> AsyncIterator[PrefectClient]:
    """The flow's own client, or one for this call: making one takes 20 ms."""
    context = FlowRunContext.get()
    if context is not None and isinstance(context.client, PrefectClient):
        yield context.client
        return
    async with get_client() as client:
        yield client


@contextlib.contextmanager
def patient_client(outage_s: float) -> Iterator[None]:
    """Let Prefect's requests be sent again for `outage_s` seconds: after 2, 4, 8, ... s."""
    retries = max(5, math.ceil(math.log2(outage_s + 2)))
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: retries}):
        yield


@contextlib.contextmanager
def suspension_waits_for_the_gate() -> Iterator[None]:
    """Keep Prefect from leaving a step when its run is suspended; `gate` does it after the step.

    Prefect 3.9 raises at the next task call of a suspended run, from a request that the contexts of
    its flows share; older versions have none.
    """
    context = FlowRunContext.get()
    request = getattr(context, "flow_run_suspension_request", None)
    if context is None or request is None:
        yield
        return
    with context.model_copy(update={"flow_run_suspension_request": type(request)()}):
        yield


def auto_page_size(step_s: float | None, total_steps: int) -> int:
    """Return the steps of the next page for `steps_per_page: auto`.

    Args:
        step_s: Median seconds of a step so far; None before the first.
        total_steps: Of the run: it has MAX_AUTO_PAGES pages at most.
    """
    if step_s is None:
        return 1
    by_time = math.floor(PAGE_S / max(step_s, PAGE_S / MAX_AUTO_STEPS))
    return max(1, min(by_time, MAX_AUTO_STEPS), math.ceil(total_steps / MAX_AUTO_PAGES))
