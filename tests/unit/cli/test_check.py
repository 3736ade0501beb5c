"""`rollflow check`: exit codes, output, and what it does not import."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from flows.cli import app

HEAVY = ("torch", "ray", "prefect", "transformers", "numpy", "pyarrow")


def rollflow(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_a_good_configuration():
    result = rollflow("check", "grpo-tiny", "actor_rollout_ref.rollout.n=8")
    assert result.exit_code == 0
    assert "preset grpo-tiny with 1 override: can be run" in result.stdout
    assert "  trajectories: 32\n" in result.stdout
    assert result.stderr == ""


def test_all_problems_in_one_message_and_no_traceback():
    result = rollflow("check", "grpo-tiny", "data.train_batch_size=6", "seeed=1", "~data.val_files")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: 3 problems in the configuration (preset grpo-tiny")
    for key in ("ppo_mini_batch_size", "seeed", "data.val_files"):
        assert key in result.stderr
    assert "Traceback" not in result.stderr


def test_json_of_a_good_configuration():
    told = json.loads(rollflow("check", "grpo-tiny", "--json").stdout)
    assert told["ok"] is True
    assert told["config"]["deadlines"]["validate"] is None
    assert told["plan"]["step"]["trajectories"] == 16
    assert told["data"] is None


def test_json_of_problems():
    result = rollflow("check", "grpo-tiny", "--json", "trainer.device=cuda", "seeed=1")
    assert result.exit_code == 2
    told = json.loads(result.stdout)
    assert told["ok"] is False
    by_path = {problem["path"]: problem for problem in told["problems"]}
    assert by_path["trainer.device"]["value"] == "cuda"
    assert by_path["seeed"]["fix"] == "did you mean seed?"


def test_every_key_on_demand():
    assert "data.prompt_key = prompt" in rollflow("check", "grpo-tiny", "--all").stdout


def test_unknown_preset_and_unknown_command():
    result = rollflow("check", "grpo-tinny")
    assert result.exit_code == 2
    assert "did you mean grpo-tiny?" in result.stderr
    assert rollflow("trane").exit_code == 2


@pytest.mark.parametrize("command", ["train", "check", "prepare", "evaluate", "resume", "ui"])
def test_every_command_has_help(command):
    result = rollflow(command, "--help")
    assert result.exit_code == 0
    assert f"Usage: root {command}" in result.stdout or f"{command} [OPTIONS]" in result.stdout


def test_check_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from flows.cli import main\n"
        "try:\n"
        "    main(['check', 'grpo-tiny', 'seed=1'])\n"
        "except SystemExit as end:\n"
        "    assert end.code in (0, None), end.code\n"
        f"print('IMPORTED', [name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.splitlines()[-1] == "IMPORTED []"
