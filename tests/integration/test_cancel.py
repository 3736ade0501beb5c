"""Ctrl-C on a real run: everything is freed in time, the run is resumable, Prefect knows."""

import json
import signal
import sqlite3
import time

import psutil
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CANCEL_S = 25
"""Prefect's worker kills a cancelled run after 30 s; ours has to have freed everything by then."""

TRACKER = """
import time
from rlcore.tracking.tracker import TRACKERS

@TRACKERS.register("hangs")
class Hangs:
    def __init__(self, folder):
        time.sleep(3600)  # as one does whose server does not answer
"""


def test_ctrl_c_frees_everything_in_time_and_the_run_can_be_evaluated_after_a_resume(project):
    (project.root / "hangs.py").write_text(TRACKER)
    process = project.start(
        "train", "grpo-tiny", "trainer.runs_root=cancelled", "trainer.user_modules=[hangs.py]",
        "trainer.logger=[console,file,hangs]",
    )  # fmt: skip
    family = project.until(process, "step    2/4")
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert time.monotonic() - began < CANCEL_S
    assert process.returncode == 130
    _, alive = psutil.wait_procs(family, timeout=5)
    assert [p.cmdline()[:3] for p in alive if p.is_running()] == []
    root = project.root / "cancelled"
    (run,) = (path for path in root.iterdir() if path.name != ".prefect")
    attempts = json.loads((run / "run.json").read_text())["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == ["cancelled"]
    states = sqlite3.connect(root / ".prefect" / "prefect.db").execute(
        "select r.state_name from flow_run r join flow f on r.flow_id = f.id where f.name = 'train'"
    )
    assert [state for (state,) in states] == ["Cancelled"]

    code, text = project.run(
        "resume", run.name, "--runs-root", "cancelled", "trainer.logger=[console,file]"
    )
    assert code == 0, text[-4000:]
    accuracy = next(line for line in text.splitlines() if line.startswith("accuracy after"))
    code, text = project.run("evaluate", run.name, "grpo-tiny", "trainer.runs_root=cancelled")
    assert code == 0, text[-4000:]
    assert f"accuracy        {accuracy.split(maxsplit=2)[2]}" in text
