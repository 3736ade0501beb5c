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


@pytest.mark.parametrize(
    ("arguments", "path", "reason"),
    [
        (["grpo-tinny"], "PRESET", "did you mean grpo-tiny?"),
        (["--from-verl", "nowhere.sh"], "--from-verl", "neither a command"),
        ([], "PRESET", "give a preset"),
    ],
)
def test_json_of_what_cannot_be_read(arguments, path, reason):
    result = rollflow("check", "--json", *arguments)
    assert result.exit_code == 2
    told = json.loads(result.stdout)
    assert told["ok"] is False
    (problem,) = told["problems"]
    assert problem["path"] == path
    assert reason in problem["reason"]


def test_json_of_values_that_json_has_no_word_for(tmp_path):
    preset = tmp_path / "dated.yaml"
    preset.write_text("trainer: {experiment_name: 2026-01-01}\nseed: .nan\n")
    told = json.loads(
        rollflow("check", str(preset), "--json").stdout,
        parse_constant=lambda word: pytest.fail(f"{word} is no JSON"),
    )
    values = {problem["path"]: problem["value"] for problem in told["problems"]}
    assert values["trainer.experiment_name"] == "2026-01-01"
    assert values["seed"] == "NaN"


def test_json_of_data_that_is_not_there_keeps_the_script():
    result = rollflow(
        "check", "--json", "--data", "--from-verl", SCRIPT, "trainer.n_gpus_per_node=1"
    )
    assert result.exit_code == 2
    told = json.loads(result.stdout)
    assert (told["ok"], told["problems"][0]["path"]) == (False, "data")
    assert told["script"]["refused"] == []


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


@pytest.mark.parametrize(
    "arguments", [["grpo-tiny", "seed=1"], ["grpo-tiny", "--json"], ["--from-verl", "{SCRIPT}"]]
)
def test_check_imports_nothing_heavy(arguments):
    given = [text.format(SCRIPT=f"{SCRIPT} trainer.n_gpus_per_node=1") for text in arguments]
    code = (
        "import sys\n"
        "from flows.cli import main\n"
        "try:\n"
        f"    main(['check', *{given!r}])\n"
        "except SystemExit as end:\n"
        "    assert end.code in (0, None), end.code\n"
        f"print('IMPORTED', [name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.splitlines()[-1] == "IMPORTED []"


SCRIPT = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a "
    "data.val_files=b actor_rollout_ref.model.path=c actor_rollout_ref.actor.use_dynamic_bsz=True "
    "actor_rollout_ref.rollout.n=8 trainer.balance_batch=True trainer.n_gpus_per_node=8"
)


def test_a_script_of_verls_is_answered_with_three_lists():
    result = rollflow("check", "--from-verl", SCRIPT)
    assert result.exit_code == 2
    assert "1 problem in the configuration (the script)" in result.stderr
    for text in ("honoured (6):", "satisfied anyway, or without effect (1):", "refused (1):"):
        assert text in result.stderr


def test_overrides_after_a_script_win():
    result = rollflow("check", "--from-verl", SCRIPT, "trainer.n_gpus_per_node=1", "seed=3")
    assert result.exit_code == 0, result.stderr
    assert "  seed = 3\n" in result.stdout
    assert "refused (0):" in result.stdout
    told = json.loads(
        rollflow("check", "--json", "--from-verl", SCRIPT, "trainer.n_gpus_per_node=1").stdout
    )
    assert told["ok"] is True
    assert told["script"]["refused"] == []
    assert "actor_rollout_ref.rollout.n=8" in told["script"]["honoured"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check"], "give a preset"),
        (["check", "grpo-tiny", "--from-verl", SCRIPT], "not both"),
        (["check", "--from-verl", "nowhere.sh"], "neither a command"),
    ],
)
def test_what_to_check_is_asked_for(arguments, message):
    result = rollflow(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_exit_codes_are_documented():
    assert "Exit codes: 0 done" in rollflow("check", "--help").stdout


def test_schema_is_printed():
    told = json.loads(rollflow("schema").stdout)
    assert told["properties"]["seed"]["unit"] == "seed"


def test_doctor_tells_its_findings():
    told = json.loads(rollflow("doctor", "--json").stdout)
    assert {"level", "subject", "message", "fix"} == set(told["findings"][0])
    result = rollflow("doctor")
    assert result.exit_code == (2 if "\nerror" in f"\n{result.stdout}" else 0)
    assert "python: 3." in result.stdout


def test_memory_is_summed_up(tmp_path):
    told = json.loads(
        rollflow("check", "grpo-tiny", f"actor_rollout_ref.model.path={tmp_path}", "--json").stdout
    )
    assert "unknown" in told["plan"]["memory"]
