"""What the task runner promises, on every supported Prefect; imports nothing that needs torch.

Bodies run in executors, which is why they report by files and return values. One file, though a
long one: it is the contract, run alone in the environment of the lowest Prefect.
"""

import asyncio
import os
import pickle
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from prefect import flow, get_client, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.filters import LogFilter
from ray.cloudpickle import register_pickle_by_value
from ray.exceptions import ActorDiedError, RayTaskError

from rlcore.cluster.executor import ExecutorPool, current_key, is_executor_process, require_executor
from rlcore.errors import (
    ConfigError,
    ExecutorDiedError,
    FencedError,
    PayloadTooLargeError,
    PhaseTimeoutError,
    TransientError,
)
from rlcore.types import CallKey
from tasks.retry import is_transient, retry_transient
from tasks.runner import PhaseRunner, RunnerOptions

# Executors cannot import this file: pytest gives it a module name of its own.
register_pickle_by_value(sys.modules[__name__])

OPTIONS = {"cache_policy": NO_CACHE, "persist_result": False}
RETRIED = {
    **OPTIONS,
    "retries": 2,
    "retry_delay_seconds": 0.05,
    "retry_condition_fn": retry_transient,
}
FENCED: list[CallKey] = []


@pytest.fixture(scope="module")
def pool(ray_session):
    pool = ExecutorPool(2, on_fence=FENCED.append)
    pool.start()
    yield pool
    pool.close()


def pids(pool):
    """Return the pids of the executors, once all are up."""
    for _ in range(200):
        if len(found := {info.pid for info in pool.executors()}) == 2:
            return found
        time.sleep(0.05)
    raise AssertionError(f"not all executors are up after 10 s: {pool.status()}")


@pytest.fixture
def runner(pool, prefect_session):
    return PhaseRunner(pool, RunnerOptions(run_id="run-1", attempt=1))


def in_flow(runner, body, *args):
    """Run an async function as a flow with this runner; return what it returns."""

    @flow(persist_result=False, task_runner=runner, validate_parameters=False)
    async def page():
        return await body(*args)

    return asyncio.run(page())


async def recorded(task_run_id, is_done=lambda run: run.state.is_final()):
    """Return the task run as the server knows it, once `is_done`."""
    async with get_client() as client:
        for _ in range(200):
            runs = [
                run
                for run in await client.read_task_runs(limit=200)
                if run.id == task_run_id and run.state is not None and is_done(run)
            ]
            if runs:
                return runs[0]
            await asyncio.sleep(0.1)
    raise AssertionError(f"task run {task_run_id} is not recorded as expected after 20 s")


async def logged(task_run_id, *needles):
    """Return the log of a task run's page, once it holds every needle."""
    text = ""
    async with get_client() as client:
        for _ in range(150):
            logs = await client.read_logs(LogFilter(task_run_id={"any_": [task_run_id]}))
            text = "\n".join(log.message for log in logs)
            if all(needle in text for needle in needles):
                return text
            await asyncio.sleep(0.1)
    raise AssertionError(f"not on the page after 15 s: {needles}; it holds:\n{text}")


def wait_for_text(path):
    """Wait until a body has written its file; return what it wrote."""
    for _ in range(400):
        if path.exists() and path.read_text():
            return path.read_text()
        time.sleep(0.05)
    raise AssertionError(f"{path} was not written in 20 s")


# Bodies


@task(**OPTIONS, task_run_name="step-{step:04d}/sync_body")
def sync_body(step, value):
    require_executor("sync_body")
    return os.getpid(), is_executor_process(), value * 2, current_key()


@task(**OPTIONS)
async def async_body(path):
    await asyncio.sleep(0.05)
    with open(path, "w") as file:  # noqa: ASYNC230 - the loop is the body's own
        file.write("done")
    return is_executor_process()


@task(**OPTIONS)
def double(value):
    return value * 2


@task(**OPTIONS)
def total(values):
    return sum(values["list"]) + values["one"]


@task(**OPTIONS)
def append(path, word, delay_s=0.0):
    time.sleep(delay_s)
    with open(path, "a") as file:
        file.write(word)


@task(**RETRIED)
def raise_config_error(path):
    with open(path, "a") as file:
        file.write("x")
    raise ConfigError("data.train_batch_size=7 is odd")


@task(**RETRIED)
def raise_transient_once(path):
    if not Path(path).exists():
        Path(path).write_text("x")
        raise TransientError("connection lost")
    return current_key().try_number


@task(**RETRIED)
def killed_once(path):
    import logging

    log = logging.getLogger("rlcore.some_worker")
    if Path(path).exists():
        log.info("second try starts")
        return "survived"
    Path(path).write_text("x")
    log.warning("last words")
    os.write(2, b"words on standard error\n")
    os.kill(os.getpid(), signal.SIGKILL)


@task(**RETRIED, timeout_seconds=1)
def overdue_once(path):
    if Path(path).exists():
        return psutil.pid_exists(int(Path(path).read_text()))
    Path(path).write_text(str(os.getpid()))
    while True:
        sum(range(100_000))  # never lets go of the interpreter for long


@task(**OPTIONS, timeout_seconds=0.3)
async def overdue():
    await asyncio.sleep(60)


@task(**OPTIONS)
def hang(path):
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


@task(**RETRIED)
def grow(blob):
    return b"x" * len(blob) * 10


@task(**OPTIONS)
def nested_submit():
    return double.submit(1)


# Contract


def test_sync_body_runs_in_an_executor_with_its_key(runner):
    async def body():
        future = sync_body.submit(12, 4)
        pid, is_executor, value, key = await future
        return pid, is_executor, value, key, await recorded(future.task_run_id)

    pid, is_executor, value, key, run = in_flow(runner, body)
    assert pid != os.getpid() and is_executor and value == 8
    assert key == CallKey(
        run_id="run-1", attempt=1, global_step=12, phase="sync_body", try_number=1
    )
    assert run.name == "step-0012/sync_body"
    assert run.state.is_completed() and run.run_count == 1


def test_async_body_runs_to_completion_in_an_executor(runner, tmp_path):
    async def body():
        return await async_body.submit(str(tmp_path / "file"))

    assert in_flow(runner, body) is True
    assert (tmp_path / "file").read_text() == "done"


def test_a_call_key_parameter_gets_the_number_of_the_try(runner, tmp_path):
    @task(**RETRIED)
    def keyed(key, path):
        if not Path(path).exists():
            Path(path).write_text("x")
            raise TransientError("once")
        return key, current_key()

    given = CallKey(run_id="run-1", attempt=1, global_step=3, inner_step=1, phase="keyed")

    async def body():
        return await keyed.submit(given, str(tmp_path / "file"))

    key, current = in_flow(runner, body)
    assert key == current
    assert (key.global_step, key.inner_step, key.try_number) == (3, 1, 2)


def test_map_keeps_the_order(runner):
    async def body():
        first = double.map([1, 2, 3])
        values = [await future for future in first]
        return values, [await future for future in double.map(first)]

    assert in_flow(runner, body) == ([2, 4, 6], [4, 8, 12])


def test_nested_futures_are_resolved(runner):
    async def body():
        one, two = double.submit(1), double.submit(2)
        return await total.submit({"list": [one, two, 10], "one": double.submit(50)})

    assert in_flow(runner, body) == 2 + 4 + 10 + 100


def test_wait_for_orders_phases(runner, tmp_path):
    path = str(tmp_path / "file")

    async def body():
        slow = append.submit(path, "first ", 0.3)
        await append.submit(path, "second", wait_for=[slow])

    in_flow(runner, body)
    assert Path(path).read_text() == "first second"


def test_failed_upstream_stops_what_depends_on_it(runner, tmp_path):
    async def body():
        failed = raise_config_error.submit(str(tmp_path / "failed"))
        dependent = append.submit(str(tmp_path / "never"), "x", wait_for=[failed])
        as_parameter = double.submit(failed)
        for future in (failed, dependent, as_parameter):
            await future.wait_async()
        return failed.state, dependent.state, as_parameter.state

    failed, dependent, as_parameter = in_flow_states(runner, body)
    assert failed.is_failed()
    assert dependent.name == as_parameter.name == "NotReady"
    assert not (tmp_path / "never").exists()


def in_flow_states(runner, body):
    """Run a flow whose result is states, which Prefect would take for its own."""
    states = []

    async def kept():
        states.extend(await body())

    in_flow(runner, kept)
    return states


def test_an_error_keeps_its_class_and_its_traceback_there_and_is_not_retried(runner, tmp_path):
    async def body():
        future = raise_config_error.submit(str(tmp_path / "file"))
        with pytest.raises(ConfigError, match="train_batch_size=7") as caught:
            await future
        page = await logged(future.task_run_id, "in raise_config_error", "Traceback")
        return caught.value, page, await recorded(future.task_run_id)

    error, page, run = in_flow(runner, body)
    assert 'raise ConfigError("data.train_batch_size=7 is odd")' in str(error.__cause__)
    assert 'raise ConfigError("data.train_batch_size=7 is odd")' in page
    assert (tmp_path / "file").read_text() == "x"
    assert run.run_count == 1 and run.state.is_failed()


def test_a_transient_error_is_retried_and_counted(runner, tmp_path):
    async def body():
        return await raise_transient_once.submit(str(tmp_path / "file"))

    assert in_flow(runner, body) == 2
    assert runner.retry_counts() == {"raise_transient_once": 1}


def test_a_killed_executor_is_an_ordinary_retry(runner, pool, tmp_path):
    before = pids(pool)

    async def body():
        future = killed_once.submit(str(tmp_path / "file"))
        value = await future
        page = await logged(
            future.task_run_id,
            "died while it ran",
            "last words",
            "words on standard error",
            "second try starts",
        )
        return value, page, await recorded(future.task_run_id)

    value, page, run = in_flow(runner, body)
    assert value == "survived"
    assert run.run_count == 2 and run.state.is_completed()
    assert page.index("last words") < page.index("second try starts")
    assert "SIGKILL" in page or "worker process has died" in page
    assert len(before & pids(pool)) == 1


def test_the_old_body_is_dead_before_the_retry_of_an_overdue_phase_starts(runner, tmp_path):
    path = tmp_path / "pid"

    async def body():
        began = time.monotonic()
        future = overdue_once.submit(str(path))
        was_alive = await future
        return was_alive, time.monotonic() - began, await recorded(future.task_run_id)

    FENCED.clear()
    was_alive, seconds, run = in_flow(runner, body)
    assert was_alive is False
    assert 1.0 <= seconds < 10
    assert run.run_count == 2
    assert [(key.phase, key.try_number) for key in FENCED] == [("overdue_once", 1)]


def test_a_deadline_without_retries_ends_as_timed_out(runner):
    async def body():
        future = overdue.submit()
        with pytest.raises(PhaseTimeoutError, match=r"phase overdue is overdue: executor-.*0\.3 s"):
            await future
        return await recorded(future.task_run_id)

    assert in_flow(runner, body).state.name == "TimedOut"


def test_deadlines_may_come_from_the_runner(pool, prefect_session, tmp_path):
    deadlines = {"hang": 0.3}
    runner = PhaseRunner(pool, RunnerOptions(deadline_for=deadlines.get))

    async def body():
        with pytest.raises(PhaseTimeoutError, match=r"its deadline is 0\.3 s"):
            await hang.submit(str(tmp_path / "pid"))

    in_flow(runner, body)


def test_cancelling_a_run_kills_the_body_at_once(runner, pool, tmp_path):
    path = tmp_path / "pid"

    @flow(persist_result=False, task_runner=runner)
    async def page():
        await hang.submit(str(path))

    async def main():
        running = asyncio.create_task(page())
        await asyncio.to_thread(wait_for_text, path)
        began = time.monotonic()
        running.cancel()
        await asyncio.wait({running}, timeout=25)
        return running.cancelled(), began

    is_cancelled, began = asyncio.run(main())
    assert is_cancelled
    assert not psutil.pid_exists(int(path.read_text()))
    assert time.monotonic() - began < 10


def test_leaving_a_flow_cancels_its_phases(runner, tmp_path):
    path = tmp_path / "pid"

    async def body():
        future = hang.submit(str(path))
        await asyncio.to_thread(wait_for_text, path)
        return future

    @flow(persist_result=False)
    async def parent():
        @flow(persist_result=False, task_runner=runner)
        async def page():
            left.append(await body())

        await page()
        await left[0].wait_async()
        return left[0].state.type.value

    left = []
    assert asyncio.run(parent()) == "CRASHED"
    assert not psutil.pid_exists(int(path.read_text()))


def test_pages_share_the_executors(runner, pool):
    before = pids(pool)

    async def body():
        return {(await sync_body.submit(1, 1))[0] for _ in range(4)}

    assert in_flow(runner, body) <= before
    assert in_flow(runner.duplicate(), body) <= before
    assert pids(pool) == before


def test_equality_and_pickling(runner, pool):
    assert runner == runner.duplicate()
    assert runner != PhaseRunner(pool, RunnerOptions(run_id="run-2"))
    copied = pickle.loads(pickle.dumps(runner))
    assert copied == runner and hash(copied) == hash(runner)
    with pytest.raises(RuntimeError, match="only the driver's runs phases"):
        copied.submit(double, {"value": 1})


def test_hooks_submit_from_their_thread_and_wait_there(runner):
    async def body():
        def hook():
            return double.submit(21).result(timeout=30)

        return await asyncio.to_thread(hook)

    assert in_flow(runner, body) == 42


def test_waiting_on_the_loop_is_refused(runner):
    async def body():
        future = double.submit(1)
        with pytest.raises(RuntimeError, match="use `await future`"):
            future.result()
        with pytest.raises(RuntimeError, match="use `await future`"):
            future.wait()
        return await future, future.result()

    assert in_flow(runner, body) == (2, 2)


def test_submit_inside_a_body_is_refused(runner):
    async def body():
        with pytest.raises(RuntimeError, match="submitted a task, which is refused"):
            await nested_submit.submit()

    in_flow(runner, body)


def test_large_parameters_and_results_are_refused_with_their_size(runner):
    async def body():
        with pytest.raises(PayloadTooLargeError, match=r"'grow' take 2\.00 MiB.*blob|argument 0"):
            await grow.submit(b"x" * (2 << 20))
        future = grow.submit(b"x" * (1 << 19))
        with pytest.raises(PayloadTooLargeError, match=r"result of 'grow' \(bytes\) takes 5\.00"):
            await future
        return await recorded(future.task_run_id)

    assert in_flow(runner, body).run_count == 1


def test_a_direct_call_is_refused_by_the_body(runner):
    with pytest.raises(RuntimeError, match="runs in an executor only"):
        sync_body.fn(1, 1)


def test_a_runner_needs_a_started_pool_and_a_loop(runner, ray_session):
    with pytest.raises(RuntimeError, match="make the flow async"), runner.duplicate():
        pass
    with pytest.raises(RuntimeError, match="must be started"):
        runner.submit(double, {"value": 1})


def test_an_older_attempt_is_refused(pool):
    def call(attempt):
        key = CallKey(run_id="fenced-run", attempt=attempt, global_step=1)
        return asyncio.run(pool.run(int, ("7",), key=key))

    assert call(2) == 7
    with pytest.raises(FencedError, match="attempt 2 of this run"):
        call(1)


def test_what_is_transient():
    assert is_transient(ExecutorDiedError("x")) and is_transient(TimeoutError())
    assert is_transient(ActorDiedError()) and is_transient(PhaseTimeoutError("x"))
    assert is_transient(RayTaskError("f", "traceback", TransientError("x")))
    assert not is_transient(RayTaskError("f", "traceback", ValueError("x")))
    for error in (ConfigError("x"), FencedError("x"), RuntimeError("x"), None):
        assert not is_transient(error)
