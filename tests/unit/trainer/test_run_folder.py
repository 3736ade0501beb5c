"""Run folder: attempts as fencing tokens, and the lock that names its holder."""

import os
import subprocess
import sys

import pytest

from rlcore.errors import CheckpointError, ConfigError, DeviceLockError, FencedError
from rlcore.trainer.run_folder import HeldLock, RunFolder, new_run_id

REQUEST = {"preset": "grpo-tiny", "overrides": {}, "config": None}


def test_attempts_count_up_and_fence_the_older_one(tmp_path):
    folder = RunFolder.create(tmp_path / "r", run_id="r", request=REQUEST)
    assert folder.begin_attempt(max_attempts=3) == 1
    folder.check_attempt(1)
    folder.end_attempt(1, "crashed", "killed")
    again = RunFolder.open(tmp_path / "r")
    assert again.begin_attempt(max_attempts=3) == 2
    with pytest.raises(FencedError, match="attempt 1 was replaced by 2"):
        folder.check_attempt(1)
    again.check_attempt(2)
    outcomes = [entry.get("outcome") for entry in again.record()["attempts"]]
    assert outcomes == ["crashed", None]
    assert again.record()["request"] == REQUEST


def test_the_next_attempt_goes_on_with_the_overrides_of_the_last(tmp_path):
    request = {**REQUEST, "overrides": {"seed": 1}}
    folder = RunFolder.create(tmp_path / "r", run_id="r", request=request)
    assert folder.last_overrides() == {"seed": 1}
    folder.begin_attempt(max_attempts=3, overrides={"seed": 1})
    folder.begin_attempt(max_attempts=3, overrides={"seed": 1, "trainer.total_epochs": 2})
    assert folder.last_overrides() == {"seed": 1, "trainer.total_epochs": 2}


def test_a_folder_that_holds_another_run_is_not_taken_over(tmp_path):
    RunFolder.create(tmp_path / "r", run_id="first", request=REQUEST)
    with pytest.raises(ConfigError, match="holds run first, not second"):
        RunFolder.create(tmp_path / "r", run_id="second", request=REQUEST)


def test_a_run_out_of_attempts_says_which_key_to_raise(tmp_path):
    folder = RunFolder.create(tmp_path / "r", run_id="r", request=REQUEST)
    folder.begin_attempt(max_attempts=1)
    with pytest.raises(CheckpointError, match=r"its 1 attempts \(trainer.max_attempts\)"):
        folder.begin_attempt(max_attempts=1)


def test_opening_a_folder_without_a_run_names_it(tmp_path):
    with pytest.raises(CheckpointError, match=r"nothing holds no run \(no run.json\)"):
        RunFolder.open(tmp_path / "nothing")


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"trainer.default_local_dir/runs_root: cannot write"):
        RunFolder.create(tmp_path / "file" / "r", run_id="r", request=REQUEST)


def test_a_held_lock_names_its_holder_and_is_free_after_the_holder_died(tmp_path):
    path = tmp_path / "x.lock"
    code = (
        "import time; from pathlib import Path; from rlcore.trainer.run_folder import HeldLock\n"
        f"with HeldLock(Path({str(path)!r}), holder='run alpha', what='it'):"
        " print('held', flush=True); time.sleep(60)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "held"
        with (
            pytest.raises(DeviceLockError, match=rf"held by run alpha \(pid {child.pid}"),
            HeldLock(path, holder="run beta", what="the devices"),
        ):
            pass
    finally:
        child.kill()
        child.communicate()
    with HeldLock(path, holder="run beta", what="the devices") as lock:
        assert lock.current_holder().startswith(f"run beta (pid {os.getpid()}")


def test_run_ids_are_distinct_and_hold_no_separator():
    ids = {new_run_id("My_exp/1") for _ in range(50)}
    assert len(ids) == 50
    assert all("_" not in i and "/" not in i and i.startswith("my-exp-1-") for i in ids)
