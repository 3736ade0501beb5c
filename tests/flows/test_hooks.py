"""Hooks of a trainer mode: in a thread of their own, with a deadline, never in an end's way."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from contextvars import ContextVar

import pytest

from rlcore.daemon_thread import DaemonThread, in_daemon_thread
from rlcore.errors import DeadlineExceededError, PhaseTimeoutError

NAME = ContextVar("name", default="")


def hook(run, action):
    """Let one hook of a run do something; return when it is over."""
    run.trainer.on_step_begin = action
    asyncio.run(run.hook("on_step_begin"))


def test_a_hook_runs_beside_the_loop_in_the_context_of_the_flow(make_run):
    seen = []
    NAME.set("of the flow")
    hook(make_run(), lambda: seen.append((threading.current_thread(), NAME.get())))
    [(thread, name)] = seen
    assert thread is not threading.main_thread()
    assert thread.daemon
    assert name == "of the flow"


def test_what_a_hook_raises_is_raised_as_it_is(make_run):
    def fails():
        raise PhaseTimeoutError("update_weights is overdue")

    # A TimeoutError, too: it is not the hook's own deadline.
    with pytest.raises(PhaseTimeoutError, match="update_weights is overdue"):
        hook(make_run(), fails)


def test_a_hooks_calls_on_the_manager_are_not_charged_to_it_but_its_own_time_is(make_run):
    run = make_run()
    run.deadlines.for_phase = lambda _: 0.1  # 0.5 s for the hook
    done = []

    def calls():
        for _ in range(2):
            with run._manager.clock.running():
                time.sleep(0.6)
        done.append(True)

    hook(run, calls)
    assert done == [True]

    def hangs_after_a_call():
        with run._manager.clock.running():
            time.sleep(0.6)
        time.sleep(5)

    began = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"did not return within 0\.5 s"):
        hook(run, hangs_after_a_call)
    assert 1.1 <= time.monotonic() - began < 4


def test_a_daemon_threads_errors_and_results_reach_its_future():
    assert in_daemon_thread(divmod, 7, 2, name="x").result(5) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        in_daemon_thread(divmod, 7, 0, name="x").result(5)


def test_a_thread_that_lives_runs_its_calls_one_after_the_other_until_it_is_closed():
    thread = DaemonThread("x")
    first, second = (thread.submit(threading.current_thread) for _ in range(2))
    assert first.result(5) is second.result(5)
    failed = thread.submit(divmod, 7, 0)
    assert isinstance(failed.exception(5), ZeroDivisionError)
    assert first.result().is_alive()
    thread.close()
    first.result().join(5)
    assert not first.result().is_alive()


MODE = """
import time

from rlcore.trainer.base import register_trainer
from rlcore.trainer.sync import PPOTrainerSync


@register_trainer("hangs")
class Hangs(PPOTrainerSync):
    def on_step_begin(self):
        time.sleep(3600)
"""

ATTEMPT = """
import asyncio, pathlib, sys
from types import SimpleNamespace
from rlcore.testing.tiny_run import tiny_config
from rlcore.trainer.run_folder import RunFolder
from rlcore.user_code import load_user_modules
from tasks.active_run import ActiveRun

root = pathlib.Path(sys.argv[1])
config = tiny_config(root, {
    "trainer.logger": ["file"],
    "trainer.user_modules": [str(root / "hangs.py")],
    "trainer.v1.trainer_mode": "hangs",
    "deadlines.update_weights": 0.1,
})
load_user_modules(config.trainer.user_modules)
pool = SimpleNamespace(pool_id="none", set_stray_sink=lambda sink: None)
cluster = SimpleNamespace(
    executors=pool, ledger=None, training=None, checkpoint_manager=None, replicas={},
    reward_model=None,
)
folder = RunFolder.create(root / "runs" / "x", run_id="x", request={})
run = ActiveRun(config=config, folder=folder, attempt=1, cluster=cluster, rows=64)
print("begins", flush=True)
asyncio.run(run.hook("on_step_begin"))
"""


def test_a_hook_that_hangs_ends_the_process_with_an_error_that_names_it(tmp_path):
    (tmp_path / "hangs.py").write_text(MODE)
    done = subprocess.run(
        [sys.executable, "-c", ATTEMPT, str(tmp_path)],
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert "begins" in done.stdout, done.stderr[-3000:]
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith(
        f"{DeadlineExceededError.__name__}: hook on_step_begin of Hangs did not return within "
        "0.5 s (step 0)"
    )
