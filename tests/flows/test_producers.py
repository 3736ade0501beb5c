"""The producers beside the body of a run, as subflows of a real flow; workers are fakes."""

import asyncio
import os
import signal
import time

import pytest
from prefect import flow
from prefect.exceptions import TerminationSignal

from flows.rollout_producer import HURRIED_DRAIN_S, rollout_producers
from rlcore.errors import ConfigError, ReplicaDiedError
from rlcore.testing.cluster import FakeCluster
from tasks.active_run import ACTIVE_RUN

pytestmark = pytest.mark.usefixtures("prefect_session")


def train(run, body, **options):
    """Run `body` as a flow beside the producers of a run."""

    @flow(name="train", persist_result=False)
    async def outer():
        token = ACTIVE_RUN.set(run)
        try:
            async with rollout_producers(run, **options):
                return await body()
        finally:
            ACTIVE_RUN.reset(token)

    return asyncio.run(outer())


async def for_ever():
    await asyncio.sleep(60)


def test_the_body_runs_when_the_worker_is_ready_which_drains_when_it_is_over(make_run):
    cluster = FakeCluster()

    async def body():
        return list(cluster.calls.names)

    assert train(make_run(cluster), body) == ["ready w1"]
    assert cluster.calls.names == ["ready w1", "stop w1 within 20", "kill w1"]


def test_a_producer_that_fails_cancels_the_body_and_its_own_error_is_raised(make_run):
    cluster = FakeCluster(lost=ReplicaDiedError("replica-0 could not be replaced"))
    cancelled = []

    async def body():
        try:
            await for_ever()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    began = time.monotonic()
    with pytest.raises(ReplicaDiedError, match="replica-0 could not be replaced"):
        train(make_run(cluster), body)
    assert cancelled
    assert time.monotonic() - began < 15
    # The worker of the failed producer is dead before the body hears of it.
    assert cluster.calls.names == ["ready w1", "kill w1", "begin_end"]


def test_a_worker_that_cannot_start_ends_a_run_whose_body_has_not_begun(make_run):
    cluster = FakeCluster({"fails_to_start": ConfigError("no such reward function")})
    begun = []

    async def body():
        begun.append(True)

    with pytest.raises(ConfigError, match="no such reward function"):
        train(make_run(cluster), body)
    assert not begun


def test_a_cancelled_run_lets_sessions_end_for_a_moment_only(make_run):
    cluster = FakeCluster({"drain_s": 60})

    async def body():
        asyncio.current_task().cancel()
        await for_ever()

    with pytest.raises(asyncio.CancelledError):
        train(make_run(cluster), body)
    assert cluster.calls.names == [
        "ready w1", "begin_end", f"stop w1 within {HURRIED_DRAIN_S:g}", "kill w1"
    ]  # fmt: skip


def test_a_supervisor_that_hangs_is_cancelled_after_the_drain_deadline(make_run):
    cluster = FakeCluster()
    run = make_run(cluster)
    run.drain_s = 0.1
    new_worker = cluster.new_agent_loop_worker

    def hangs(index):
        worker = new_worker(index)

        async def stop(deadline_s):
            cluster.calls.add("stop")
            await for_ever()

        worker.stop = stop
        return worker

    cluster.new_agent_loop_worker = hangs
    train(run, lambda: asyncio.sleep(0), kill_s=0.2)
    assert cluster.calls.names == ["ready w1", "stop", "kill w1"]
    assert cluster.calls.seconds_between("stop", "kill w1") < 5


def test_a_loop_that_ends_with_the_process_cancels_the_run_whichever_task_ends_first(make_run):
    """As after SIGTERM between two callbacks: `asyncio.run` cancels every task, producers too."""

    async def body():
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await for_ever()

    with pytest.raises(asyncio.CancelledError):
        train(make_run(FakeCluster()), body)


def sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


async def a_task_of_its_own():
    sigterm()


@pytest.mark.parametrize("where", ["a callback", "a background task"])
def test_sigterm_ends_the_run_wherever_its_exception_goes(make_run, where):
    cluster = FakeCluster()
    freed, lost, tasks = [], [], []

    async def body():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: lost.append(context["exception"]))
        if where == "a callback":
            loop.call_soon(sigterm)
        else:
            tasks.append(asyncio.create_task(a_task_of_its_own()))
        try:
            await for_ever()
        finally:
            await asyncio.sleep(0.1)  # freeing things is not cancelled a second time
            freed.append(True)

    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        train(make_run(cluster), body)
    assert freed == [True]
    assert time.monotonic() - began < 15
    gone_to = [*lost, *[task.exception() for task in tasks]]
    assert [type(error) for error in gone_to] == [TerminationSignal]


def test_sigterm_in_the_bodys_own_code_hurries_the_drain_too(make_run):
    cluster = FakeCluster({"drain_s": 60})

    async def body():
        sigterm()

    # Prefect sends the signal once more, to whoever heard it before the flow.
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with pytest.raises((TerminationSignal, asyncio.CancelledError)):
            train(make_run(cluster), body)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]
    assert cluster.calls.names == [
        "ready w1", "begin_end", f"stop w1 within {HURRIED_DRAIN_S:g}", "kill w1"
    ]  # fmt: skip


def test_sigterm_that_ends_a_producer_is_no_failure_of_the_producer(make_run):
    cluster = FakeCluster()
    make = cluster.new_agent_loop_worker

    def new_worker(index):
        worker = make(index)

        async def status(deadline_s):
            sigterm()
            raise AssertionError("the signal's exception did not come here")

        worker.status = status
        return worker

    cluster.new_agent_loop_worker = new_worker
    with pytest.raises(asyncio.CancelledError):
        train(make_run(cluster), for_ever)
