"""Scripts of verl's whose features are there train, shrunk to the tiny model."""

import json
import math
from pathlib import Path

import pytest

from rlcore.tracking.curves import read_metrics

pytestmark = [pytest.mark.integration, pytest.mark.training_runs]

SCRIPTS = Path(__file__).resolve().parents[1] / "data" / "verl_scripts"
KEPT = {
    "dapo": ("train", "vanilla", 0.28, "grpo"),
    "grpo": ("grpo_0_5b", "vanilla", 0.2, "grpo"),
    "gspo": ("train", "gspo", 4e-4, "grpo"),
    "ppo": ("train", "vanilla", 0.2, "gae"),
    "rloo": ("train", "vanilla", 0.2, "rloo"),
}


def trained(joined, script: str, *more: str) -> tuple[Path, dict[int, dict[str, float]]]:
    """Train a script shrunk to the tiny model; return the run's folder and its metrics by step."""
    root = f"runs-of-{script}"
    shrunk = (SCRIPTS / "shrunk.txt").read_text().split()
    code, text = joined.run(
        "train", "--from-verl", str(SCRIPTS / "trains" / f"{script}.sh"), *shrunk, *more,
        f"trainer.runs_root={root}",
    )  # fmt: skip
    assert code == 0, text[-4000:]
    (folder,) = (p for p in (joined.root / root).iterdir() if p.name != ".prefect")
    config = json.loads((folder / "config.json").read_text())
    actor = config["actor_rollout_ref"]["actor"]
    assert (
        config["trainer"]["experiment_name"],
        actor["policy_loss"]["loss_mode"],
        actor["clip_ratio_high"],
        config["algorithm"]["adv_estimator"],
    ) == KEPT[script]
    assert (folder / "model" / "config.json").is_file()
    return folder, read_metrics(folder / "metrics.jsonl")


def test_all_scripts_are_trained_here():
    assert {path.stem for path in (SCRIPTS / "trains").glob("*.sh")} == set(KEPT)


@pytest.mark.parametrize("script", ["dapo", "grpo", "gspo", "rloo"])
def test_a_script_trains(joined, script):
    # The untrained tiny model is right once in 400 responses: groups would never differ in acc.
    more = ["algorithm.filter_groups.metric=reward"] if script == "dapo" else []
    _, steps = trained(joined, script, *more)
    assert list(steps)[-2:] == [1, 2]
    # 8 prompts a step as the script's keys ask for; dynamic sampling feeds more until 8 are left.
    assert steps[2]["training/prompts_fed"] >= 8
    assert steps[2]["actor/optimizer_steps"] == 2  # mini-batches of 4
    assert all("actor/pg_loss" in steps[n] and "critic/vf_loss" not in steps[n] for n in (1, 2))
    assert ("actor/reward_kl_penalty" in steps[2]) == (script == "rloo")


def test_the_script_with_a_critic_trains_with_kls_and_a_teacher_on_two_ranks(joined):
    folder, steps = trained(
        joined, "ppo",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
        # What the policy was: there is no reward in its log-probs at first.
        "distillation.enabled=true",
        "distillation.teacher_models.teacher_model.model_path=models/tiny",
        "distillation.distillation_loss.use_policy_gradient=true",
        "distillation.distillation_loss.loss_mode=k1",
        "critic.model.path=models/tiny",
        "critic.optim.lr=1e-3",
        "trainer.critic_warmup=2",  # 5 in the script
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=3",
        "trainer.save_freq=3",
    )  # fmt: skip
    assert "actor/pg_loss" not in steps[1] and "critic/vf_loss" in steps[1]
    assert "actor/pg_loss" in steps[2] and "critic/vf_loss" in steps[2]
    # the policy is the reference up to and with step 2: the weight falls by 0.2 * 16 / 100
    weights = [steps[n]["actor/reward_kl_penalty_coeff"] for n in (1, 2, 3)]
    assert weights == pytest.approx([0.001, 0.001 * 0.968, 0.001 * 0.968**2])
    assert steps[1]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-5)
    assert steps[2]["actor/kl_loss"] == pytest.approx(0, abs=1e-5)
    assert steps[3]["actor/reward_kl_penalty"] != 0 and steps[3]["actor/kl_loss"] > 0
    assert "timing_s/compute_teacher_log_probs" in steps[1]
    distilled = "actor/distillation/"
    for step in (1, 2):
        assert steps[step][f"{distilled}teacher_kl"] == pytest.approx(0, abs=1e-5)
    assert steps[2][f"{distilled}loss"] == pytest.approx(0, abs=1e-5)
    # at ratio 1 the loss is minus the mean of the rewards
    found = steps[3][f"{distilled}teacher_kl"]
    assert abs(found) > 1e-5
    assert steps[3][f"{distilled}loss"] == pytest.approx(found, abs=1e-4)
    assert steps[1]["critic/values/max"] == 0 and steps[2]["critic/values/max"] != 0
    for name in ("vf_loss", "vf_clipfrac", "vpred_mean", "vf_explained_var", "grad_norm", "lr"):
        assert math.isfinite(steps[3][f"critic/{name}"])
    spread = steps[1]["global_seqlen/balanced_max"] - steps[1]["global_seqlen/balanced_min"]
    assert spread <= steps[1]["global_seqlen/mean"] / 2
    assert (folder / "global_step_3/actor/critic/state/.metadata").is_file()
