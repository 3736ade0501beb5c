"""What `rollflow check` tells."""

import json

from rlcore.config import RunConfig, load_config, resolve_config
from rlcore.config.report import as_json, as_text, plan, settings
from rlcore.config.tree import honoured_fields, put

A = "actor_rollout_ref."


def test_settings_are_what_differs_from_the_defaults():
    overrides = [f"{A}rollout.n=8", "deadlines.first_call=1800", "trainer.total_epochs=30"]
    changed = settings(load_config("grpo-tiny", overrides))
    assert changed[f"{A}rollout.n"] == 8
    assert changed["data.train_files"] == ["data/tiny/train.parquet"]
    assert "deadlines.first_call" not in changed
    assert "trainer.total_epochs" not in changed
    assert f"{A}actor.optim.betas" not in changed


def test_changed_settings_alone_give_the_same_config():
    config = load_config("grpo-smollm2", [f"{A}actor.clip_ratio=0.3", "deadlines.validate=5"])
    tree = {}
    for path, value in settings(config).items():
        tree = put(tree, path, value)
    assert RunConfig.model_validate(tree) == config


def test_all_settings_are_all_keys():
    assert list(settings(load_config("grpo-tiny"), show_all=True)) == list(honoured_fields())


def test_plan_shows_the_sums():
    config = load_config(
        "grpo-tiny",
        ["data.train_batch_size=12", f"{A}rollout.n=3", f"{A}rollout.num_replicas=2"],
    )
    sizes = plan(config)
    assert sizes["step"]["trajectories"] == 36  # 12 x 3
    assert sizes["step"]["tokens_at_most"] == 2592  # 36 x (64 + 8)
    assert sizes["step"]["rounds_of_slots"] == 2  # 36 over 2 x 16 slots
    assert sizes["step"]["optimizer_steps"] == 3  # 12 / 4
    assert sizes["staleness"]["budget"] == 0
    # Per row 8 x 64 bytes of prompt, and per response token 4 int64 and 10 float32: 72 bytes.
    assert sizes["buffer"]["bytes_at_most"] == 36 * (8 * 64 + 72 * 8)


def test_plan_of_micro_batches_and_rhythm():
    config = load_config(
        "grpo-tiny",
        [
            f"{A}actor.use_dynamic_bsz=false",
            f"{A}actor.ppo_micro_batch_size_per_gpu=8",
            "trainer.save_freq=-1",
            "trainer.test_freq=1",
            "~trainer.total_training_steps",
            "ray.address=auto",
            "ray.num_threads=2",
        ],
    )
    sizes = plan(config)
    assert sizes["step"]["micro_batches"] == "2 of 8 trajectories per optimizer step"
    assert sizes["run"]["checkpoints"] == "never"
    assert sizes["run"]["validation"] == "every step"
    assert sizes["run"]["steps"] == "1 epochs"
    assert (sizes["devices"]["ray"], sizes["devices"]["threads_per_process"]) == ("auto", 2)


def test_text_names_source_settings_and_notices():
    found = resolve_config("grpo-tiny", ["trainer.balance_batch=True"])
    text = as_text(found.config, found.notices, found.source)
    assert text.startswith("preset grpo-tiny with 1 override: can be run\n")
    assert "\n  actor_rollout_ref.rollout.n = 4\n" in text
    assert "\n  trajectories: 16\n" in text
    assert text.endswith("  trainer.balance_batch=true: ranks are always balanced")
    assert "data.prompt_key" not in text
    assert "data.prompt_key = prompt" in as_text(found.config, [], found.source, show_all=True)


def test_json_holds_the_whole_config():
    found = resolve_config("grpo-tiny")
    told = json.loads(json.dumps(as_json(found.config, found.notices, found.source)))
    assert told["ok"] is True
    assert RunConfig.model_validate(told["config"]) == found.config
    assert told["changed"] == settings(found.config)
