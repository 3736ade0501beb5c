"""The gate between steps: pause, suspend, an outage, the time limit; against a real server."""

import asyncio
import time

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import Pause
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelled, Paused, Running, Suspended

from rlcore.errors import DeadlineExceededError, RolloutError
from tasks.attempts import keep_earlier_pages, this_flow_run, was_cancelled
from tasks.between_steps import (
    BetweenSteps,
    auto_page_size,
    patient_client,
    suspension_waits_for_the_gate,
)


def gate_of(flow_run_id, **options):
    return BetweenSteps(
        **{"flow_run_id": flow_run_id, "outage_s": 1, "max_wall_s": None, **options}
    )


async def set_state(flow_run_id, state):
    async with get_client() as client:
        await client.set_flow_run_state(flow_run_id, state, force=True)


@pytest.mark.integration
def test_a_paused_run_waits_and_goes_on(prefect_session):
    @flow
    async def run():
        me = this_flow_run().flow_run_id
        gate = gate_of(me)
        assert await gate.gate() is None
        await set_state(me, Paused(timeout_seconds=300))
        waiting = asyncio.create_task(gate.gate())
        await asyncio.sleep(2.5)
        assert not waiting.done()
        await set_state(me, Running())
        return await asyncio.wait_for(waiting, 30)

    assert asyncio.run(run(return_state=True)).is_completed()


@pytest.mark.integration
def test_a_suspended_run_is_told_so_after_the_step_and_not_inside(prefect_session):
    done = []

    @flow
    async def page(step):
        done.append(step)

    @flow
    async def run():
        me = this_flow_run().flow_run_id
        with suspension_waits_for_the_gate():
            await page(1)
            await set_state(me, Suspended(timeout_seconds=300))
            request = getattr(FlowRunContext.get(), "flow_run_suspension_request", None)
            assert request is None or not request.is_requested()
            await page(2)  # the step that was running is finished
            state = await gate_of(me).gate()
        assert state.name == "Suspended"
        raise Pause(state=state)

    with pytest.raises(Pause):
        asyncio.run(run())
    assert done == [1, 2]


@pytest.mark.integration
def test_a_run_that_was_ended_from_outside_stops(prefect_session):
    @flow
    async def run():
        me = this_flow_run().flow_run_id
        await set_state(me, Cancelled(message="by hand"))
        with pytest.raises(RolloutError, match="ended from outside: Cancelled: by hand"):
            await gate_of(me).gate()

    asyncio.run(run(return_state=True))


@pytest.mark.integration
def test_without_a_worker_an_end_is_a_persons(prefect_session):
    @flow
    async def run():
        who = this_flow_run()
        assert (who.run_count, who.deployment_id) == (1, None)
        return await was_cancelled(who)

    assert asyncio.run(run()) is True


def test_an_outage_longer_than_allowed_ends_the_run_and_says_how_long_it_waited():
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(DeadlineExceededError, match=r"waited 1 s \(trainer.prefect_outage_s\)"),
    ):
        asyncio.run(gate_of(None).wait_for_server())


def test_requests_are_sent_again_for_as_long_as_an_outage_may_last():
    # After 2 + 4 + ... + 2**n seconds, which is 2**(n + 1) - 2.
    for outage_s in (60, 600, 3600):
        with patient_client(outage_s):
            assert 2 ** (PREFECT_CLIENT_MAX_RETRIES.value() + 1) - 2 >= outage_s


def test_the_clock_of_an_attempt():
    assert not gate_of(None).is_time_over
    gate = gate_of(None, max_wall_s=0.05)
    assert not gate.is_time_over
    time.sleep(0.06)
    assert gate.is_time_over


@pytest.mark.parametrize(
    ("step_s", "total", "size"),
    [
        (None, 10_000, 1),  # before the first step
        (12.0, 45, 1),
        (2.0, 45, 2),
        (0.5, 200, 10),
        (0.001, 200, 100),
        (0.0, 200, 100),
        (12.0, 20_000, 20),  # a thousand pages at most
    ],
)
def test_auto_pages_take_a_few_seconds_and_are_a_thousand_at_most(step_s, total, size):
    assert auto_page_size(step_s, total) == size


@pytest.mark.integration
def test_a_run_that_is_started_again_opens_pages_of_its_own(prefect_session):
    """With results stored by default, as some servers have it; the parent is retried by hand."""
    ran = []

    @flow(flow_run_name="page-{step}", persist_result=False)
    async def page(step):
        ran.append(step)

    @flow
    async def run(steps):
        keep_earlier_pages([page])
        for step in steps:
            await page(step)
        if len(steps) == 3:
            raise ValueError("stop")

    from prefect.flow_engine import run_flow_async

    async def both():
        async with get_client() as client:
            made = await client.create_flow_run(run, parameters={"steps": [1, 2, 3]})
            await run_flow_async(
                run, flow_run=made, parameters={"steps": [1, 2, 3]}, return_type="state"
            )
            from prefect.states import Scheduled

            await client.set_flow_run_state(made.id, Scheduled(), force=True)
            again = await client.read_flow_run(made.id)
            await run_flow_async(
                run, flow_run=again, parameters={"steps": [4, 5]}, return_type="state"
            )
            flow_runs = await client.read_flow_runs()
            return sorted(r.name for r in flow_runs if r.name.startswith("page-"))

    with temporary_settings():
        names = asyncio.run(both())
    assert ran == [1, 2, 3, 4, 5]
    assert names == ["page-1", "page-2", "page-3", "page-4", "page-5"]
