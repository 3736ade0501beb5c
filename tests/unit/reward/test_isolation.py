"""Whatever a reward function does, the others are scored and nothing becomes 0."""

import asyncio
import contextlib
import time

import psutil
import pytest

from rlcore.errors import ConfigError, DataError, RewardError, RewardTimeoutError
from rlcore.isolation.messages import Setup
from rlcore.isolation.pool import IsolatedProcess, Limits
from rlcore.reward.function import Reward
from rlcore.reward.loop import SCORER, RewardLoopManager

FAULTS = """
import ctypes, os, re, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang in C":
        # libc's pause never returns to the interpreter, whatever a Python signal handler wants.
        re.fullmatch("(a*)*b", "a" * 64)
    if solution_str == "sleep":
        time.sleep(600)
    if solution_str == "raise":
        return {}["missing"]
    if solution_str == "exit":
        sys.exit(3)
    if solution_str == "segfault":
        ctypes.string_at(0)
    if solution_str == "print":
        print("x" * 100_000)
        os.system("echo to stdout")
    results = {"nan": float("nan"), "string": "1", "no score": {"acc": 1.0},
               "not JSON": {"score": 1.0, "who": object()},
               "huge": {"score": 1, "log": "x" * 10**6}}
    return results.get(solution_str, 1.0)
"""
GOOD = Reward(score=1.0, extra={"acc": 1.0})


def test_a_hang_in_c_is_killed_in_time_and_stalls_nobody(make_config, make_task, score_all):
    config = make_config(FAULTS, reward__timeout=1.0, reward__num_workers=2)
    tasks = [make_task("hang in C")] + [make_task(f"good {i}") for i in range(200)]
    started = time.monotonic()
    bad, *good = score_all(config, tasks)
    assert isinstance(bad, RewardTimeoutError)
    assert "longer than reward.timeout=1 s" in str(bad)
    assert good == [GOOD] * 200
    # Both processes start (2 imports); the hang costs its second, not more.
    assert time.monotonic() - started < 15


def test_the_others_do_not_wait_for_one_that_hangs(make_config, make_task):
    async def run():
        pool = RewardLoopManager(make_config(FAULTS, reward__timeout=30.0, reward__num_workers=2))
        await pool.start()
        hanging = asyncio.create_task(pool.score(make_task("hang in C")))
        await asyncio.sleep(0.1)
        started = time.monotonic()
        rewards = [await pool.score(make_task()) for _ in range(50)]
        took = time.monotonic() - started
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        # The cancelled call's process was killed and its place is filled again.
        replaced = pool.num_replaced
        again = await asyncio.gather(*(pool.score(make_task()) for _ in range(4)))
        await pool.close()
        return rewards, took, replaced, again

    rewards, took, replaced, again = asyncio.run(run())
    assert rewards == [GOOD] * 50
    assert took < 5
    assert (replaced, again) == (1, [GOOD] * 4)


BAD_CALLS = {
    "raise": (RewardError, "KeyError: 'missing'"),
    "exit": (RewardError, "SystemExit: 3"),
    "segfault": (RewardError, "the process of the reward function died: signal SIGSEGV"),
    "nan": (DataError, "must be a finite number, is float nan"),
    "string": (DataError, "must be a finite number, is str '1'"),
    "no score": (DataError, r"returned \['acc'\] without 'score'"),
    "not JSON": (DataError, "function's who is object; .* stored as JSON"),
    "huge": (DataError, "function's log takes 1000002 characters as JSON, more than 20000"),
}


def test_bad_calls_are_errors_and_those_after_them_are_scored(make_config, make_task, score_all):
    config = make_config(FAULTS, reward__num_workers=1)
    tasks = [make_task(text) for fault in BAD_CALLS for text in (fault, "good")]
    outcome = score_all(config, tasks)
    assert outcome[1::2] == [GOOD] * len(BAD_CALLS)
    for error, (kind, message) in zip(outcome[::2], BAD_CALLS.values(), strict=True):
        with pytest.raises(kind, match=message):
            raise error


def test_the_traceback_names_the_users_line(make_config, make_task, score_all):
    [error] = score_all(make_config(FAULTS, reward__num_workers=1), [make_task("raise")])
    assert 'return {}["missing"]' in str(error)
    assert "my_reward.py" in str(error)


def test_what_the_function_prints_does_not_disturb_it(make_config, make_task, score_all):
    config = make_config(FAULTS, reward__num_workers=1)
    assert score_all(config, [make_task("print"), make_task()]) == [GOOD, GOOD]


def test_a_leak_costs_a_process_and_no_session(make_config, make_task):
    code = """
    kept = []
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        kept.append(b"x" * 25_000_000)
        return float(len(kept))
    """
    config = make_config(code, reward__num_workers=1, reward__max_memory_mb=128)

    async def run():
        pool = RewardLoopManager(config)
        await pool.start()
        rewards = [await pool.score(make_task()) for _ in range(10)]
        await pool.close()
        return [reward.score for reward in rewards], pool.num_replaced

    scores, replaced = asyncio.run(run())
    # 64 MB of growth are allowed: the third call is over it.
    assert scores == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]
    assert replaced == 3


def test_one_call_that_wants_all_memory_fails_alone(make_config, make_task, score_all):
    code = """
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return 1.0 if solution_str == "text" else float(len(bytearray(10**9)))
    """
    config = make_config(code, reward__num_workers=1, reward__max_memory_mb=256)
    bad, good = score_all(config, [make_task("greedy"), make_task()])
    assert good == GOOD
    assert str(bad).endswith("MemoryError")


def test_a_function_that_cannot_be_loaded_is_told_at_the_start(make_config, make_task, score_all):
    config = make_config("def compute_score(text): return 1.0")
    with pytest.raises(ConfigError, match="compute_score must take"):
        score_all(config, [make_task()])


def test_who_is_cancelled_while_a_process_ends_waits_for_its_end(make_config):
    """Else the loop may close first, and the process is never reaped."""
    limits = Limits(
        timeout_s=10.0,
        start_s=60.0,
        what="the reward function",
        timeout_key="reward.timeout",
        error=RewardError,
        timeout_error=RewardTimeoutError,
    )
    setup = Setup(factory=SCORER, config=make_config(FAULTS), max_memory_mb=256)

    async def run():
        process = await IsolatedProcess.start(setup, limits)
        killing = asyncio.create_task(process.kill())
        await asyncio.sleep(0)
        killing.cancel()
        outcome = await asyncio.gather(killing, return_exceptions=True)
        return outcome, process.was_killed

    [error], was_killed = asyncio.run(run())
    assert isinstance(error, asyncio.CancelledError)
    assert was_killed


def test_a_process_that_dies_between_tasks_is_replaced(make_config, make_task):
    async def run():
        rewards = RewardLoopManager(make_config(FAULTS, reward__num_workers=1))
        await rewards.start()
        [child] = scorers()
        child.kill()
        outcome = await asyncio.gather(
            *(rewards.score(make_task()) for _ in range(3)), return_exceptions=True
        )
        await rewards.close()
        return outcome

    # The killing of an idle process is nobody's fault: the response is scored by the next one.
    assert asyncio.run(run()) == [GOOD] * 3


def scorers():
    """The processes that score; other tests of this session may have left a server of theirs."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "rlcore.isolation.process" in child.cmdline():
                found.append(child)
    return found


def test_nothing_is_left_running(make_config, make_task):
    async def run():
        rewards = RewardLoopManager(make_config(FAULTS, reward__num_workers=2))
        await rewards.start()
        children = scorers()
        hanging = asyncio.create_task(rewards.score(make_task("hang in C")))
        await asyncio.sleep(0.1)
        await rewards.close()
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        return children

    children = asyncio.run(run())
    assert len(children) == 2
    assert not any(child.is_running() for child in children)
