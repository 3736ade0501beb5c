"""`rollflow runs`, `export`, `stop`, `rollback` and `deploy` as a person calls them."""

import json
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from flows.cli import app
from rlcore.retraining.promotion import PromotedStore

runner = CliRunner()


def run_folder(root, name, **attempt):
    folder = root / "runs" / name
    folder.mkdir(parents=True)
    record = {"run_id": name, "attempts": [{"attempt": 1, "began": time.time(), **attempt}]}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def called(*arguments):
    done = runner.invoke(app, list(map(str, arguments)))
    return done.exit_code, done.output


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return tmp_path


def test_runs_lists_and_names_a_run_that_is_not_there(here):
    run_folder(here, "one", outcome="finished")
    code, text = called("runs")
    assert code == 0
    assert text.startswith("one  finished")
    code, text = called("runs", "one", "two")
    assert code == 2
    assert "two: there is no such run in runs; runs there: one" in text
    code, text = called("runs", "one")
    assert code == 2
    assert "two runs are compared, not 1" in text


def test_export_copies_the_model_whole_and_never_over_something(here):
    folder = run_folder(here, "one", outcome="finished")
    code, text = called("export", "one", "--out", "out/model")
    assert code == 2
    assert "neither a model nor a checkpoint" in text
    assert list((here / "out").iterdir()) == []
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    code, text = called("export", "one", "--out", "out/model")
    assert (code, text) == (0, "model: out/model\n")
    assert (here / "out" / "model" / "config.json").read_text() == "{}"
    code, text = called("export", "one", "--out", "out/model")
    assert code == 2
    assert "out/model exists" in text


def test_stop_interrupts_the_process_of_a_run(here):
    code = "import time\nprint('up', flush=True)\ntry: time.sleep(60)\n"
    code += "except KeyboardInterrupt: print('interrupted', flush=True)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        run_folder(here, "one", pid=process.pid, flow_run_id=None)
        done, text = called("stop", "one")
        assert done == 0, text
        assert f"process {process.pid} is interrupted" in text
        assert process.communicate(timeout=60)[0] == "interrupted\n"
    finally:
        process.kill()
        process.wait()
    assert process.returncode != -signal.SIGKILL


def test_stop_says_what_is_not_running_or_elsewhere_or_gone(here):
    run_folder(here, "ended", pid=1, outcome="finished")
    code, text = called("stop", "ended")
    assert code == 2
    assert "is not running: it is finished" in text
    elsewhere = run_folder(here, "elsewhere", pid=1, flow_run_id=None)
    (elsewhere / "run.holder").write_text("run elsewhere (pid 1 on another-host)\n")
    code, text = called("stop", "elsewhere")
    assert code == 2
    assert "pid 1 on another-host" in text
    # Process 1 is older than any attempt, so it only passes for one that began before it.
    run_folder(here, "gone", pid=2**22 + 1, flow_run_id=None)
    code, text = called("stop", "gone")
    assert code == 2
    assert "is gone; `rollflow resume` continues it" in text


def test_rollback_is_one_command(here):
    for name in ("a", "b"):
        (here / name).mkdir()
        (here / name / "config.json").write_text("{}")
        PromotedStore("promoted").promote(f"run-{name}", here / name, reason="gate")
    code, text = called("rollback")
    assert (code, text) == (0, "run-a is current in promoted again\n")
    code, text = called("rollback")
    assert code == 2
    assert "no promotion to go back to" in text


def test_deploy_needs_a_server_that_stays(here):
    code, text = called("deploy")
    assert code == 2
    assert "PREFECT_API_URL is not set" in text
    assert "rollflow serve" in text
