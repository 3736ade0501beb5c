"""Commands that run flows, in a process of their own over stand-ins for flows and data check."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
EXTEND = "from pkgutil import extend_path\n__path__ = extend_path(__path__, __name__)\n"

FLOWS = """
import asyncio, json, os, sys
from rlcore.errors import ConfigError, DataError, TransientError

HOME = os.environ.get("PREFECT_HOME")
PREFECT_CAME_FIRST = "prefect" in sys.modules

async def FLOW(**parameters):
    seen = {"flow": "FLOW", "home": HOME, "prefect_first": PREFECT_CAME_FIRST, **parameters}
    print("SEEN", json.dumps(seen), flush=True)
    end = parameters["overrides"].get("trainer.project_name", "well")
    if end == "user-error":
        raise ConfigError("reward function r.py: no function compute_score in it")
    if end == "bad-row":
        error = DataError("row 7 has no responses")
        error.add_note("This ended attempt 1 of run r-1")
        raise error
    if end == "fault":
        raise TransientError("the queue host died")
    if end == "crashed":
        from prefect.exceptions import CrashedRun
        raise CrashedRun("executor died three times")
    if end == "cancelled":
        from prefect.exceptions import CancelledRun
        raise CancelledRun("by a person")
    if end == "long":
        await asyncio.sleep(60)
    accuracy = {"mean": 0.5, "stderr": 0.03125, "n": 256}
    return {"run_id": "r-1", "curves": ["a.png", "b.png"], "accuracy_after": accuracy}
"""

CHECK = """
from dataclasses import dataclass
from rlcore.errors import DataError

@dataclass
class Report:
    rows: int
    def lines(self):
        return [f"training prompts {self.rows}"]

def check_data(config):
    if config.seed == 13:
        raise DataError("train.parquet row 7: prompt is no list of messages")
    return Report(rows=64)
"""

PREPARE = """
from pathlib import Path
from rlcore.errors import ConfigError
class Report:
    def lines(self): return ["digest  abc"]
def prepare_named(name, out, settings):
    if name == "tiny" and settings: raise ConfigError(f"not {', '.join(settings)}")
    return [Path(out or "data", name), f"{name} {out} {settings}"]
def read_report(folder): return Report() if isinstance(folder, Path) else None
"""

# Prefect itself takes a second to import.
PREFECT_ERRORS = """
class CancelledRun(Exception): ...
class CrashedRun(Exception): ...
class FailedRun(Exception): ...
class TerminationSignal(BaseException): ...
class Pause(BaseException): ...
"""

PREFECT_SERVER = """
class SubprocessASGIServer:
    server_process = None
    address = "http://127.0.0.1:8000"
    def start(self, timeout): ...
"""

PREFECT_SETTINGS = """
import os
from types import SimpleNamespace

def get_current_settings():
    url = open("prefect.toml").read().strip() if os.path.exists("prefect.toml") else None
    return SimpleNamespace(api=SimpleNamespace(url=url))
"""

PREFECT_COMMAND = """
import json, os, sys
print("SERVER", json.dumps({"argv": sys.argv[1:], "env": dict(os.environ)}))
"""


@pytest.fixture
def project(tmp_path):
    """Return a folder with stand-ins that come before the real modules."""
    files = {
        "stand_ins/flows/__init__.py": EXTEND,
        "stand_ins/flows/train.py": FLOWS.replace("FLOW(", "train(").replace('"FLOW"', '"train"'),
        "stand_ins/flows/evaluate_policy.py": FLOWS.replace("FLOW(", "evaluate_policy(").replace(
            '"FLOW"', '"evaluate"'
        ),
        "stand_ins/rlcore/__init__.py": EXTEND,
        "stand_ins/rlcore/data/__init__.py": EXTEND,
        "stand_ins/rlcore/data/check.py": CHECK,
        "stand_ins/rlcore/data/prepare.py": PREPARE,
        "stand_ins/prefect/__init__.py": "",
        "stand_ins/prefect/__main__.py": PREFECT_COMMAND,
        "stand_ins/prefect/exceptions.py": PREFECT_ERRORS,
        "stand_ins/prefect/server/api/server.py": PREFECT_SERVER,
        "stand_ins/prefect/settings.py": PREFECT_SETTINGS,
        "stand_ins/prefect/main.py": "",
        "stand_ins/prefect/logging/handlers.py": (
            "import logging\nclass PrefectConsoleHandler(logging.StreamHandler): ..."
        ),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return tmp_path


def environment(project, **extra):
    given = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    folders = [project / "stand_ins", REPOSITORY]
    return {**given, "PYTHONPATH": os.pathsep.join(map(str, folders)), **extra}


def rollflow(project, *arguments, env=None):
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=project,
        env=env or environment(project),
    )


def seen(result, word="SEEN"):
    lines = [line for line in result.stdout.splitlines() if line.startswith(word)]
    assert len(lines) == 1, result.stdout + result.stderr
    return json.loads(lines[0].removeprefix(word))


def test_train_checks_runs_and_tells(project):
    result = rollflow(project, "train", "grpo-tiny", "seed=3", "trainer.logger=[file]", "seed=4")
    assert result.returncode == 0, result.stderr
    assert seen(result) == {
        "flow": "train",
        "home": str(project / "runs" / ".prefect"),
        "prefect_first": False,
        "preset": "grpo-tiny",
        "overrides": {"trainer.logger": ["file"], "seed": 4},
        "config": None,
    }
    told = result.stdout.splitlines()
    assert told[0] == "training prompts 64"
    assert told[-5:] == [
        "run id          r-1",
        "curves          a.png",
        "                b.png",
        "accuracy after  0.500 ± 0.031 (n=256)",
        "Prefect UI      rollflow ui --runs-root runs",
    ]


def test_train_uses_the_server_of_the_environment(project):
    env = environment(project, PREFECT_API_URL="http://127.0.0.1:4999/api")
    result = rollflow(project, "train", "grpo-tiny", env=env)
    assert result.returncode == 0, result.stderr
    assert seen(result)["home"] is None
    assert result.stdout.splitlines()[-1] == "Prefect UI      http://127.0.0.1:4999"
    assert not (project / "runs").exists()


def test_a_server_that_a_file_of_prefects_names_is_refused(project):
    (project / "prefect.toml").write_text("http://127.0.0.1:4999/api")
    result = rollflow(project, "train", "grpo-tiny")
    assert result.returncode == 2
    assert "names the Prefect server http://127.0.0.1:4999/api" in result.stderr
    assert "SEEN" not in result.stdout


def test_a_database_of_the_environment_is_told_to_be_for_other_servers(project):
    env = environment(project, PREFECT_SERVER_DATABASE_CONNECTION_URL="postgresql+asyncpg://x/y")
    result = rollflow(project, "train", "grpo-tiny", env=env)
    assert result.returncode == 0, result.stderr
    home = project / "runs" / ".prefect"
    assert (
        "note: PREFECT_SERVER_DATABASE_CONNECTION_URL is for a server of yours; runs without "
        f"PREFECT_API_URL are recorded in {home}"
    ) in result.stdout


@pytest.mark.parametrize(
    ("override", "code", "message"),
    [
        ("seed=13", 2, "error: train.parquet row 7: prompt is no list of messages\n"),
        ("trainer.nnodes=2", 2, "error: 1 problem in the configuration"),
        ("trainer.project_name=user-error", 2, "error: reward function r.py: no function"),
        (
            "trainer.project_name=bad-row",
            1,
            "error: row 7 has no responses\nThis ended attempt 1 of run r-1\n",
        ),
        ("trainer.project_name=fault", 1, "error: the queue host died\n"),
        ("trainer.project_name=crashed", 1, "error: executor died three times\n"),
        ("trainer.project_name=cancelled", 130, "cancelled\n"),
    ],
)
def test_ends_of_train(project, override, code, message):
    result = rollflow(project, "train", "grpo-tiny", override)
    assert result.returncode == code, result.stderr
    assert result.stderr.startswith(message)
    assert "Traceback" not in result.stderr
    assert "Prefect UI" not in result.stdout


def test_the_stand_ins_have_prefects_names():
    from prefect import exceptions

    for name in ("CancelledRun", "CrashedRun", "FailedRun"):
        assert issubclass(getattr(exceptions, name), Exception)
    for name in ("TerminationSignal", "Pause"):
        assert not issubclass(getattr(exceptions, name), Exception)


def test_interrupt(project):
    with subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "train", "grpo-tiny", "trainer.project_name=long"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=project,
        env=environment(project),
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("SEEN"):
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "interrupted\n"


def test_python_m_flows_train_is_the_same_command(project):
    # The real flows/train.py hands its arguments to this function.
    code = "from flows.cli import main; main(['train', 'grpo-tiny', 'seed=7'])"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=project,
        env=environment(project),
    )
    assert seen(result)["overrides"] == {"seed": 7}


def test_evaluate(project):
    result = rollflow(project, "evaluate", "r-1", "grpo-tiny", "data.val_max_samples=8")
    assert result.returncode == 0, result.stderr
    told = seen(result)
    assert (told["flow"], told["model"], told["preset"]) == ("evaluate", "r-1", "grpo-tiny")
    assert told["overrides"] == {"data.val_max_samples": 8}


def write_run(project, **request):
    folder = project / "runs" / "r-1"
    folder.mkdir(parents=True)
    wanted = {"preset": "grpo-tiny", "overrides": {"seed": 5}, "config": None, **request}
    record = {"run_id": "r-1", "request": wanted, "attempts": []}
    (folder / "run.json").write_text(json.dumps(record))


@pytest.mark.parametrize("name", ["r-1", "runs/r-1"])
def test_resume_takes_what_the_run_was_asked_for(project, name):
    write_run(project)
    result = rollflow(project, "resume", name, "trainer.max_attempts=9")
    assert result.returncode == 0, result.stderr
    told = seen(result)
    assert told["overrides"] == {"seed": 5, "trainer.max_attempts": 9}
    assert (told["preset"], told["config"], told["resume"]) == ("grpo-tiny", None, "r-1")


def test_resume_of_no_run(project):
    result = rollflow(project, "resume", "r-9")
    assert result.returncode == 2
    assert "runs/r-9 holds no run" in result.stderr


def test_resume_of_a_run_that_lies_elsewhere(project):
    write_run(project, overrides={"trainer.runs_root": "elsewhere"})
    result = rollflow(project, "resume", "runs/r-1")
    assert result.returncode == 2
    assert f"its configuration means {project / 'elsewhere' / 'r-1'}" in result.stderr


def test_prepare_says_where_and_what(project):
    result = rollflow(project, "prepare", "gcd", "out=/d", "max_value=7", "size=9")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "ready: /d/gcd",
        "digest  abc",
        "ready: gcd /d {'max_value': 7, 'size': 9}",
    ]


def test_prepare_refuses_what_it_does_not_take(project):
    result = rollflow(project, "prepare", "tiny", "size=3")
    assert result.returncode == 2
    assert result.stderr == "error: not size\n"


def test_ui_serves_the_embedded_database_on_loopback(project):
    home = project / "runs" / ".prefect"
    home.mkdir(parents=True)
    (home / "prefect.db").touch()
    env = environment(project, PREFECT_API_URL="http://elsewhere/api")
    result = rollflow(project, "ui", "--port", "48123", env=env)
    assert result.returncode == 0, result.stderr
    told = seen(result, "SERVER")
    assert told["argv"] == ["server", "start", "--host", "127.0.0.1", "--port", "48123"]
    assert told["env"]["PREFECT_HOME"] == str(home)
    assert told["env"]["PREFECT_SERVER_UI_API_URL"] == "http://127.0.0.1:48123/api"
    assert "PREFECT_API_URL" not in told["env"]
    assert "new runs are recorded at http://elsewhere/api" in result.stdout
    assert "http://127.0.0.1:48123" in result.stdout


def test_ui_without_runs(project):
    result = rollflow(project, "ui", "--runs-root", "nowhere")
    assert result.returncode == 2
    assert "no run has been recorded in" in result.stderr


def test_data_of_check(project):
    good = rollflow(project, "check", "grpo-tiny", "--data")
    assert (good.returncode, good.stdout.splitlines()[-1]) == (0, "  training prompts 64")
    told = json.loads(rollflow(project, "check", "grpo-tiny", "--data", "--json").stdout)
    assert told["data"] == {"rows": 64}
    bad = rollflow(project, "check", "grpo-tiny", "--data", "--json", "seed=13")
    assert bad.returncode == 2
    assert "row 7" in json.loads(bad.stdout)["problems"][0]["reason"]
