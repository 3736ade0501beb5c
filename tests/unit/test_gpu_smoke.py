"""What of `make gpu-smoke` a CPU reaches: its refusal, its steps on the embedded engine."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlcore.config.load import examine
from rlcore.rollout.transformers_engine import TransformersEngine
from rlcore.testing.tiny_model import build_tiny_model
from rlcore.training.schedule import LearningRate
from rlcore.training.spec import TrainingSpec
from rlcore.training.worker import TrainingWorker

SCRIPT = Path(__file__).resolve().parents[1] / "gpu" / "smoke.py"


@pytest.fixture(scope="module")
def smoke():
    spec = importlib.util.spec_from_file_location("gpu_smoke", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu_it_says_so_in_one_line_and_fails():
    assert not torch.cuda.is_available(), "this test is for a machine without a GPU"
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stdout == "gpu-smoke: nothing was checked: torch finds no GPU here\n"


def test_its_steps_hold_on_a_cpu_with_the_embedded_engine(smoke, tmp_path, capsys):
    model = tmp_path / "model"
    build_tiny_model(model, num_layers=2, width=64)
    engine = TransformersEngine(str(model), "float32", 32, 64, 1)
    spec = TrainingSpec(
        run_id="gpu-smoke", attempt=1, folder=str(tmp_path / "run"), model_path=str(model),
        dtype="float32", learning_rate=LearningRate(peak=1e-3), mini_batch_groups=2,
    )  # fmt: skip
    worker = TrainingWorker(spec)
    checks = smoke.Checks()
    source = smoke.Source(worker, str(tmp_path), "float32")
    manager = smoke.check_backends(checks, source, engine, ["shm", "naive"])
    for step in (1, 2):
        smoke.grpo_step(checks, engine, worker, manager, [[5, 6, 7], [9, 8]], step)
    assert (checks.failed, checks.num_held) == ([], 2 + 2 * 4)
    assert "ok     step 2: new weights are served: version 2" in capsys.readouterr().out


def test_a_failed_check_is_printed_and_counted(smoke, capsys, tmp_path):
    checks = smoke.Checks()
    checks.hold("one", True, "1")
    checks.hold("two", 0, "2")
    assert (checks.num_held, checks.failed) == (1, ["two"])
    assert capsys.readouterr().out == "ok     one: 1\nFAILED two: 2\n"
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": s, "actor/grad_norm": 1.0, "checkpoint_engine/version": s} for s in (1, 2)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    smoke.check_metrics(checks, "sync", path)
    assert checks.failed[1:] == [
        "sync: every step moved the policy", "sync: the last weights are served",
    ]  # fmt: skip


def test_every_mode_that_exists_has_a_part(smoke, tmp_path):
    assert set(smoke.PARTS) == {"colocated", *smoke.MODES}
    for mode in smoke.MODES:
        command = smoke.train_command(mode, tmp_path)
        assert Path(command[0]).name == "rollflow" and command[1:3] == ["train", "grpo-smollm2"]
        paths = {problem.path for problem in examine("grpo-smollm2", command[3:]).problems}
        assert paths <= {"actor_rollout_ref.rollout.name"}, "vLLM need not be here"
