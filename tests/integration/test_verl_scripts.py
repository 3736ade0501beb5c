"""Scripts of verl's whose features are there train, shrunk to the tiny model."""

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.training_runs]

SCRIPTS = Path(__file__).resolve().parents[1] / "data" / "verl_scripts"


@pytest.mark.parametrize("path", sorted((SCRIPTS / "trains").glob("*.sh")), ids=lambda p: p.stem)
def test_a_script_trains(project, path):
    root = f"runs-of-{path.stem}"
    shrunk = (SCRIPTS / "shrunk.txt").read_text().split()
    if path.stem == "dapo":
        # The untrained tiny model is right once in 400 responses: groups would never differ in acc.
        shrunk.append("algorithm.filter_groups.metric=reward")
    code, text = project.run(
        "train", "--from-verl", str(path), *shrunk, f"trainer.runs_root={root}"
    )
    assert code == 0, text[-4000:]
    (folder,) = (p for p in (project.root / root).iterdir() if p.name != ".prefect")
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert [step["step"] for step in steps][-2:] == [1, 2]
    # 8 prompts a step as the script's keys ask for; dynamic sampling feeds more until 8 are left.
    assert steps[-1]["training/prompts_fed"] >= 8
    config = json.loads((folder / "config.json").read_text())
    actor = config["actor_rollout_ref"]["actor"]
    kept = {
        "grpo": ("grpo_0_5b", "vanilla", 0.2),
        "gspo": ("train", "gspo", 4e-4),
        "dapo": ("train", "vanilla", 0.28),
    }
    assert (
        config["trainer"]["experiment_name"],
        actor["policy_loss"]["loss_mode"],
        actor["clip_ratio_high"],
    ) == kept[path.stem]
    assert (folder / "model" / "config.json").is_file()
