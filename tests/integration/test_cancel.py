"""Ctrl-C on a real run: everything is freed in time, the run is resumable, Prefect knows.

One run for all: cancelled by Ctrl-C in the middle of a weight update, resumed and killed by a
second one, resumed to its end. By Prefect during rollout: test_a_long_run.py.
"""

import json
import shutil
import signal
import sqlite3
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from rlcore.trainer.snapshots import snapshot_root

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

CANCEL_S = 25
"""Prefect's worker kills a cancelled run after 30 s; ours has to have freed everything by then."""

START_S = 150
ENGINE = Path(__file__).with_name("user_code") / "faulty_engine.py"
ROOT = "cancelled"

TRACKER = """
import time
from rlcore.tracking.tracker import TRACKERS

@TRACKERS.register("hangs")
class Hangs:
    def __init__(self, folder):
        time.sleep(3600)  # as one does whose server does not answer
"""


@dataclass
class Ended:
    """How an attempt ended by Ctrl-C."""

    run: Path
    code: int
    seconds: float
    left: list[list[str]]
    """Processes that it left behind."""

    def attempts(self):
        return json.loads((self.run / "run.json").read_text())["attempts"]


def interrupted(project, process, family, *, times, gone_s=5):
    """Send Ctrl-C as often as said; wait for the end.

    What belonged to the run, `family`, may take `gone_s` seconds more to be gone.
    """
    began = time.monotonic()
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    process.communicate(timeout=120)
    seconds = time.monotonic() - began
    _, alive = psutil.wait_procs(family, timeout=gone_s)
    (run,) = (path for path in (project.root / ROOT).iterdir() if path.name != ".prefect")
    left = [p.cmdline()[:3] for p in alive if p.is_running()]
    return Ended(run=run, code=process.returncode, seconds=seconds, left=left)


@pytest.fixture(scope="module")
def cancelled(project):
    (project.root / "hangs.py").write_text(TRACKER)
    shutil.copy(ENGINE, project.root)
    hold, held = project.root / "hold_update", project.root / "update_is_held"
    hold.touch()
    process = project.start(
        "train", "grpo-tiny", f"trainer.runs_root={ROOT}",
        "trainer.user_modules=[hangs.py,faulty_engine.py]",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=faulty",
        "trainer.logger=[console,file,hangs]", "trainer.max_attempts=4",
    )  # fmt: skip
    family = project.until(process, "step    1/4")
    ends = time.monotonic() + START_S
    while not held.exists():
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < ends, "no update is held"
        time.sleep(0.2)
    ended = interrupted(project, process, family, times=1)
    hold.unlink()
    return ended


@pytest.fixture(scope="module")
def killed(project, cancelled):
    process = project.start(
        "resume", cancelled.run.name, "--runs-root", ROOT, "trainer.logger=[console,file]"
    )
    family = project.until(process, "step    3/4")
    return interrupted(project, process, family, times=2, gone_s=30)


def test_ctrl_c_in_an_update_frees_everything_in_time_also_beside_a_tracker_that_hangs(
    project, cancelled
):
    assert cancelled.seconds < CANCEL_S
    assert cancelled.code == 130
    assert cancelled.left == []
    assert cancelled.attempts()[0]["outcome"] == "cancelled"
    # The last snapshot is on disk: `resume` loses no step, and the memory is free.
    assert (cancelled.run / "global_step_2" / "trainer.json").is_file()
    assert not snapshot_root(cancelled.run).exists()
    states = sqlite3.connect(project.root / ROOT / ".prefect" / "prefect.db").execute(
        "select r.state_name from flow_run r join flow f on r.flow_id = f.id "
        "where f.name = 'train' order by r.start_time"
    )
    assert states.fetchone() == ("Cancelled",)


def test_a_second_ctrl_c_ends_it_in_time_too_and_leaves_nothing_behind(killed):
    assert killed.seconds < CANCEL_S
    assert killed.code == 130
    assert killed.left == []
    assert len(killed.attempts()) == 2


def test_after_both_the_run_is_resumed_to_its_end_and_can_be_evaluated(project, killed):
    run = killed.run
    code, text = project.run("resume", run.name, "--runs-root", ROOT)
    assert code == 0, text[-4000:]
    assert json.loads((run / "run.json").read_text())["attempts"][-1]["outcome"] == "finished"
    accuracy = next(line for line in text.splitlines() if line.startswith("accuracy after"))
    code, text = project.run("evaluate", run.name, "grpo-tiny", f"trainer.runs_root={ROOT}")
    assert code == 0, text[-4000:]
    assert f"accuracy        {accuracy.split(maxsplit=2)[2]}" in text


def answer(url, body=None, *, timeout_s):
    """Ask a server that may still be starting; return what it says."""
    request = urllib.request.Request(
        url,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    ends = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10) as reply:
                return reply.read().decode()
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < ends, f"{url} does not answer"
            time.sleep(0.5)


def test_rollflow_ui_serves_the_embedded_database_with_the_run_in_it(project, cancelled):
    port = project.free_port()
    server = project.start("ui", "--runs-root", ROOT, "--port", str(port))
    try:
        url = f"http://127.0.0.1:{port}"
        of_train = {"flows": {"name": {"any_": ["train"]}}, "sort": "START_TIME_ASC"}
        found = json.loads(answer(f"{url}/api/flow_runs/filter", of_train, timeout_s=90))
        assert found[0]["state_name"] == "Cancelled"
        assert found[0]["parameters"]["overrides"]["trainer.runs_root"] == ROOT
        assert "<html" in answer(url, timeout_s=10)
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert not psutil.pid_exists(server.pid)
