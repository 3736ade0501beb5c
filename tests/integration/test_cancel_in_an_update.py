"""Ctrl-C in the middle of a weight update: all is freed in time, the run is resumable.

Cancelled during rollout, by Prefect: test_a_long_run.py.
"""

import json
import shutil
import signal
import sqlite3
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CANCEL_S = 25
"""Prefect's worker kills a cancelled run after 30 s; ours has to have freed everything by then."""

START_S = 150
ENGINE = Path(__file__).with_name("user_code") / "faulty_engine.py"


def test_ctrl_c_in_an_update_frees_everything_and_the_run_is_resumed(project):
    shutil.copy(ENGINE, project.root)
    hold, held = project.root / "hold_update", project.root / "held"
    hold.touch()
    process = project.start(
        "train", "grpo-tiny", "trainer.runs_root=cut-off",
        "trainer.user_modules=[faulty_engine.py]",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=faulty",
    )  # fmt: skip
    ends = time.monotonic() + START_S
    while not held.exists():
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < ends, "no update is held"
        time.sleep(0.2)
    family = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert time.monotonic() - began < CANCEL_S
    assert process.returncode == 130
    hold.unlink()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert [p.cmdline()[:3] for p in alive if p.is_running()] == []
    root = project.root / "cut-off"
    (run,) = (path for path in root.iterdir() if path.name != ".prefect")
    attempts = json.loads((run / "run.json").read_text())["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == ["cancelled"]
    states = sqlite3.connect(root / ".prefect" / "prefect.db").execute(
        "select r.state_name from flow_run r join flow f on r.flow_id = f.id where f.name = 'train'"
    )
    assert [state for (state,) in states] == ["Cancelled"]

    code, text = project.run("resume", run.name, "--runs-root", "cut-off")
    assert code == 0, text[-4000:]
