"""Three steps of the main job on SmolLM2 with vLLM as engine, by the command: `make test-vllm`.

In float32, so that engine and trainer have to agree to the last digits. The model and the data are
those of `make model`.
"""

from pathlib import Path

import pytest
import torch
from real_parts.project import Project
from transformers import AutoModelForCausalLM

from rlcore.tracking.curves import read_metrics
from rlcore.tracking.engine_gap import VLLM_MEAN

pytestmark = [pytest.mark.integration, pytest.mark.vllm, pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parents[2]
A = "actor_rollout_ref."
STEPS = 3
# Rewards of a group differ from the first step on: every step changes the weights.
REWARD = """
def digits(data_source, solution_str, ground_truth, extra_info=None):
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run's console and folder."""
    root = tmp_path_factory.mktemp("s")  # short: sockets lie below it
    (root / "tmp").mkdir()
    for name in ("models", "data"):
        (root / name).symlink_to(ROOT / name)
    (root / "reward.py").write_text(REWARD)
    code, text = Project(root).run(
        "train", "grpo-smollm2", f"{A}rollout.name=vllm", f"{A}rollout.dtype=float32",
        f"{A}actor.dtype=float32", f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1",
        "reward.custom_reward_function.path=reward.py",
        "reward.custom_reward_function.name=digits", timeout_s=400,
    )  # fmt: skip
    assert code == 0, text[-4000:]
    (folder,) = (path for path in (root / "runs").iterdir() if path.name != ".prefect")
    return text, folder


def test_engine_and_trainer_agree_after_every_update(run):
    by_step = read_metrics(run[1] / "metrics.jsonl")
    assert set(by_step) == {0, *range(1, STEPS + 1)}
    for step in range(1, STEPS + 1):
        metrics = by_step[step]
        assert metrics["actor/grad_norm"] > 0
        assert metrics["checkpoint_engine/version"] == step
        # Not 1e-5: see `VLLM_MEAN`. Weights of the step before are 1e-3 off and more.
        assert 0 < metrics["training/rollout_logp_diff_mean"] <= VLLM_MEAN
        assert metrics["training/rollout_logp_diff_max"] <= 1e-3
        assert metrics["training/rollout_logp_alarm"] == 0
        assert metrics["training/prompts_fed"] == 8


def test_the_weights_that_were_served_have_changed(run):
    """So that agreement in steps 2 and 3 is agreement about new weights."""
    before, after = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (ROOT / "models" / "smollm2-135m-instruct", run[1] / "model")
    )
    ids = torch.tensor([[1, 500, 600, 700]])
    with torch.no_grad():
        gap = (before(ids).logits.log_softmax(-1) - after(ids).logits.log_softmax(-1)).abs().max()
    assert gap > 1e-2


def test_the_console_has_one_line_per_step_and_nothing_of_vllms(run):
    lines = run[0].splitlines()
    assert sum(line.startswith("step ") for line in lines) == STEPS + 1
    assert [line for line in lines if "vllm" in line.lower() or "raylet" in line] == []
