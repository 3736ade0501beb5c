"""The executor pool without Prefect: what is asked of it when things go wrong."""

import asyncio
import json
import logging
import os
import socket
import sys
import threading
import time

import psutil
import pytest
from ray.cloudpickle import register_pickle_by_value

from rlcore.cluster.executor import ExecutorPool, PoolLimits
from rlcore.cluster.log_stream import LogServer, StreamHandler
from rlcore.errors import (
    BodyError,
    DeadlineExceededError,
    ExecutorDiedError,
    PhaseTimeoutError,
    RLCoreError,
)
from rlcore.types import CallKey

# Executors cannot import this file: pytest gives it a module name of its own.
register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.integration

KEY = CallKey(run_id="run-1", attempt=1, global_step=1, phase="phase")


@pytest.fixture
def pool(ray_session):
    pool = ExecutorPool(1, limits=PoolLimits(acquire_deadline_s=0.3))
    pool.start()
    yield pool
    pool.close()


def run(pool, fn, *args, **options):
    return asyncio.run(pool.run(fn, args, key=KEY, **options))


class TwoArgumentsError(Exception):
    """Pickles, but does not unpickle."""

    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def wait_until(is_done):
    for _ in range(200):
        if is_done():
            return
        time.sleep(0.01)
    raise AssertionError("waited 2 s in vain")


def raise_two_arguments():
    raise TwoArgumentsError(1, 2)


def leave():
    sys.exit(3)


def log_and_sleep(message, seconds):
    logging.getLogger("rlcore.body").warning(message)
    time.sleep(seconds)
    return os.getpid()


def test_what_cannot_travel_arrives_as_text_and_the_executor_lives_on(pool):
    with pytest.raises(BodyError, match="TwoArgumentsError: 1 2") as caught:
        run(pool, raise_two_arguments)
    assert "in raise_two_arguments" in str(caught.value.__cause__)
    with pytest.raises(BodyError, match="SystemExit: 3"):
        run(pool, leave)
    with pytest.raises(TypeError, match="'int' cannot be sent to an executor"):
        run(pool, int, threading.Lock())
    assert run(pool, os.getpid) == pool.executors()[0].pid


def test_waiting_for_an_executor_names_who_holds_it(pool):
    async def main():
        holder = asyncio.create_task(pool.run(log_and_sleep, ("x", 1.0), key=KEY))
        await asyncio.sleep(0.1)
        with pytest.raises(DeadlineExceededError, match=r"waited 0\.3 s .*executor-0\.0.* runs"):
            await pool.run(os.getpid, key=KEY)
        return await holder

    assert asyncio.run(main()) == pool.executors()[0].pid
    assert run(pool, os.getpid) == pool.executors()[0].pid


def test_a_cancelled_waiter_does_not_lose_the_executor(pool):
    async def main():
        holder = asyncio.create_task(pool.run(log_and_sleep, ("x", 0.2), key=KEY))
        await asyncio.sleep(0.05)
        waiter = asyncio.create_task(pool.run(os.getpid, key=KEY))
        await asyncio.sleep(0.05)
        waiter.cancel()
        await holder
        return await pool.run(os.getpid, key=KEY)

    assert asyncio.run(main()) == pool.executors()[0].pid


def test_records_of_a_body_go_to_its_call(pool):
    records = []
    run(pool, log_and_sleep, "hello", 0.0, on_log=records.append)
    wait_until(lambda: records)
    assert [(r.source, r.name, r.level, r.message) for r in records] == [
        ("executor-0.0", "rlcore.body", logging.WARNING, "hello")
    ]


def test_an_overdue_body_is_dead_when_the_caller_hears_of_it(pool):
    [info] = pool.executors()
    with pytest.raises(PhaseTimeoutError, match=r"its deadline is 0\.2 s"):
        run(pool, log_and_sleep, "x", 60.0, deadline_s=0.2)
    assert not psutil.pid_exists(info.pid)


def test_a_process_that_does_not_die_costs_its_place_and_those_who_wait_hear_of_it(ray_session):
    # No time to die in: as for a process that a broken disk or device holds in the kernel.
    limits = PoolLimits(death_deadline_s=0.0, acquire_deadline_s=60.0)
    pool = ExecutorPool(2, limits=limits)
    pool.start()

    async def overdue():
        with pytest.raises(RLCoreError, match=r"did not die within 0 s .* is not retried"):
            await pool.run(log_and_sleep, ("x", 60.0), key=KEY, deadline_s=0.2)

    async def main():
        await overdue()
        lost = [line for line in pool.status() if "is lost: it did not die" in line]
        assert len(lost) == 1
        assert await pool.run(os.getpid, key=KEY)  # the other one works
        began = time.monotonic()
        holder = asyncio.create_task(overdue())
        await asyncio.sleep(0.05)
        for call in (asyncio.create_task(pool.run(os.getpid, key=KEY)), None):
            with pytest.raises(ExecutorDiedError, match=r"no executor is left: .* is lost: .*; "):
                await (call or pool.run(os.getpid, key=KEY))
        await holder
        return time.monotonic() - began

    try:
        assert asyncio.run(main()) < 10
    finally:
        pids = [info.pid for info in pool.executors()]
        wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
        pool.close()


def test_user_modules_are_loaded_at_start_and_their_errors_reach_the_driver(ray_session, tmp_path):
    good, bad = tmp_path / "good_loop.py", tmp_path / "bad_loop.py"
    good.write_text("import sys\nsys.rollflow_test_mark = 7\n")
    bad.write_text("raise ValueError('no such tool')\n")
    pool = ExecutorPool(1, user_modules=[str(good)])
    pool.start()
    assert run(pool, lambda: sys.rollflow_test_mark) == 7  # type: ignore[attr-defined]
    pool.close()
    with pytest.raises(Exception, match="no such tool"):
        ExecutorPool(1, user_modules=[str(bad)]).start()


def test_closing_kills_all_executors_and_refuses_calls(ray_session):
    pool = ExecutorPool(2)
    pool.start()
    pids = [info.pid for info in pool.executors()]
    pool.close()
    assert len(pids) == 2 and not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(ExecutorDiedError, match="was closed"):
        run(pool, os.getpid)


def test_log_streams_need_the_token_and_end_with_their_process():
    strays = []
    server = LogServer(on_stray=strays.append)
    stranger = socket.create_connection((server.address.host, server.address.port))
    stranger.sendall(json.dumps({"token": "guess", "source": "executor-0.0"}).encode() + b"\n")
    assert stranger.recv(1) == b""  # the server hung up
    handler = StreamHandler(server.address, "trainer-rank-0")
    handler.emit(logging.LogRecord("rlcore.x", 20, "", 0, "loss %.1f", (0.5,), None))
    assert not server.gone("trainer-rank-0").is_set()
    handler._leave()
    assert server.gone("trainer-rank-0").wait(5)
    assert not server.gone("executor-0.0").is_set()
    assert [(r.source, r.message) for r in strays] == [("trainer-rank-0", "loss 0.5")]
    server.close()
    stranger.close()
