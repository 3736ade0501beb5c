"""Scripts of verl's whose features are there train, shrunk to the tiny model."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.training_runs]

SCRIPTS = Path(__file__).resolve().parents[1] / "data" / "verl_scripts"
KEPT = {
    "dapo": ("train", "vanilla", 0.28, "grpo"),
    "grpo": ("grpo_0_5b", "vanilla", 0.2, "grpo"),
    "gspo": ("train", "gspo", 4e-4, "grpo"),
    "ppo": ("train", "vanilla", 0.2, "gae"),
    "rloo": ("train", "vanilla", 0.2, "rloo"),
}


@pytest.mark.parametrize("path", sorted((SCRIPTS / "trains").glob("*.sh")), ids=lambda p: p.stem)
def test_a_script_trains(joined, path):
    root = f"runs-of-{path.stem}"
    shrunk = (SCRIPTS / "shrunk.txt").read_text().split()
    if path.stem == "ppo":  # the script warms the critic up for 5 steps; these are 2
        shrunk += ["critic.model.path=models/tiny", "trainer.critic_warmup=2"]
    if path.stem == "dapo":
        # The untrained tiny model is right once in 400 responses: groups would never differ in acc.
        shrunk.append("algorithm.filter_groups.metric=reward")
    code, text = joined.run("train", "--from-verl", str(path), *shrunk, f"trainer.runs_root={root}")
    assert code == 0, text[-4000:]
    (folder,) = (p for p in (joined.root / root).iterdir() if p.name != ".prefect")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").open()][-2:]
    assert [step["step"] for step in steps] == [1, 2]
    # 8 prompts a step as the script's keys ask for; dynamic sampling feeds more until 8 are left.
    assert steps[-1]["training/prompts_fed"] >= 8
    assert steps[-1]["actor/optimizer_steps"] == 2  # mini-batches of 4
    config = json.loads((folder / "config.json").read_text())
    actor = config["actor_rollout_ref"]["actor"]
    assert (
        config["trainer"]["experiment_name"],
        actor["policy_loss"]["loss_mode"],
        actor["clip_ratio_high"],
        config["algorithm"]["adv_estimator"],
    ) == KEPT[path.stem]
    with_critic = [("critic/vf_loss" in step, "actor/pg_loss" in step) for step in steps]
    assert with_critic == (
        [(True, False), (True, True)] if path.stem == "ppo" else [(False, True)] * 2
    )
    assert ("actor/reward_kl_penalty" in steps[-1]) == (path.stem == "rloo")
    assert (folder / "model" / "config.json").is_file()
