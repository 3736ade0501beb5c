"""Rules between keys, and wrong values: each with the message that one gets."""

import pytest
from pydantic import ValidationError

from rlcore.config import RunConfig, load_config
from rlcore.config.load import examine
from rlcore.errors import ConfigError

A = "actor_rollout_ref."
ACTOR = f"{A}actor."
VAL = f"{A}rollout.val_kwargs."


def problems_of(*overrides):
    return {problem.path: problem for problem in examine("grpo-tiny", list(overrides)).problems}


@pytest.mark.parametrize(
    ("overrides", "path", "message"),
    [
        (
            ["data.train_batch_size=6"],
            f"{ACTOR}ppo_mini_batch_size",
            "data.train_batch_size 6 = 1 x ppo_mini_batch_size 4 + 2",
        ),
        (
            ["data.train_batch_size=2"],
            f"{ACTOR}ppo_mini_batch_size",
            "data.train_batch_size 2 = 0 x ppo_mini_batch_size 4 + 2",
        ),
        (
            [f"{ACTOR}use_dynamic_bsz=false", f"{ACTOR}ppo_micro_batch_size_per_gpu=5"],
            f"{ACTOR}ppo_micro_batch_size_per_gpu",
            "ppo_mini_batch_size 4 x rollout.n 4 = 16 trajectories = 3 x 5 + 1",
        ),
        (
            [f"{ACTOR}use_dynamic_bsz=false"],
            f"{ACTOR}ppo_micro_batch_size_per_gpu",
            "nothing says how mini-batches are cut",
        ),
        (
            [f"{ACTOR}ppo_max_token_len_per_gpu=71"],
            f"{ACTOR}ppo_max_token_len_per_gpu",
            "data.max_prompt_length 64 + max_response_length 8 = 72 tokens",
        ),
        ([f"{A}rollout.n=1"], f"{A}rollout.n", "at least 2"),
        (["algorithm.gamma=0.9"], "algorithm.gamma", "no effect with algorithm.adv_estimator=grpo"),
        (["algorithm.lam=0.9"], "algorithm.lam", "no effect with algorithm.adv_estimator=grpo"),
        ([f"{ACTOR}loss_scale_factor=8"], f"{ACTOR}loss_scale_factor", "loss_agg_mode=token-mean"),
        (
            [f"{ACTOR}optim.lr_warmup_steps=2", f"{ACTOR}optim.lr_warmup_steps_ratio=0.1"],
            f"{ACTOR}optim.lr_warmup_steps_ratio",
            "lr_warmup_steps=2",
        ),
        ([f"{VAL}do_sample=true"], f"{VAL}temperature", "needs a temperature above 0"),
        ([f"{VAL}temperature=0.7"], f"{VAL}temperature", "do_sample=false"),
        ([f"{VAL}n=4"], f"{VAL}n", "4 times the same response"),
        (["trainer.resume_mode=resume_path"], "trainer.resume_from_path", "resume_path needs it"),
        (
            ["trainer.resume_from_path=runs/x/global_step_2"],
            "trainer.resume_from_path",
            "resume_mode=auto",
        ),
        (
            ["trainer.val_only=true", "trainer.val_before_train=false"],
            "trainer.val_before_train",
            "trainer.val_only=true",
        ),
    ],
)
def test_broken_rule(overrides, path, message):
    found = problems_of(*overrides)
    assert list(found) == [path]
    assert message in found[path].reason
    assert found[path].fix
    with pytest.raises(ConfigError, match=path):
        load_config("grpo-tiny", overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.train_batch_size=8"],
        [f"{ACTOR}use_dynamic_bsz=false", f"{ACTOR}ppo_micro_batch_size_per_gpu=16"],
        [f"{ACTOR}ppo_max_token_len_per_gpu=72"],
        [f"{A}rollout.n=1", "trainer.val_only=true"],
        [f"{ACTOR}loss_scale_factor=8", f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm"],
        [f"{ACTOR}optim.lr_warmup_steps=2"],
        [f"{VAL}do_sample=true", f"{VAL}temperature=0.7", f"{VAL}n=4"],
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path=x"],
    ],
)
def test_kept_rule(overrides):
    assert problems_of(*overrides) == {}


def test_several_rules_are_told_together():
    found = problems_of("data.train_batch_size=6", "algorithm.gamma=0.9", f"{A}rollout.n=1")
    assert set(found) == {"algorithm.gamma", f"{ACTOR}ppo_mini_batch_size", f"{A}rollout.n"}


def test_rules_are_told_beside_wrong_values():
    found = problems_of("data.train_batch_size=6", "trainer.total_epochs=0")
    assert list(found) == ["trainer.total_epochs", f"{ACTOR}ppo_mini_batch_size"]


def test_a_rule_is_not_told_about_a_default_in_place_of_a_wrong_value():
    assert list(problems_of("data.train_batch_size=0")) == ["data.train_batch_size"]
    # The default of ppo_mini_batch_size, 256, does not divide 6 either: nothing to tell.
    found = problems_of("data.train_batch_size=6", f"{ACTOR}ppo_mini_batch_size=-1")
    assert list(found) == [f"{ACTOR}ppo_mini_batch_size"]


def test_the_model_refuses_by_itself_too():
    tree = load_config("grpo-tiny").model_dump(mode="json")
    tree["data"]["train_batch_size"] = 6
    with pytest.raises(ValidationError, match="1 x ppo_mini_batch_size 4"):
        RunConfig.model_validate(tree)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("data.train_batch_size=zero", "valid integer"),
        ("data.train_batch_size=true", "a number is needed"),
        ("data.train_batch_size=1.5", "valid integer"),
        ("data.train_batch_size=null", "valid integer"),
        ("data.train_files=[]", "at least 1 item"),
        ("data.train_files=[1]", "valid string"),
        ("data.shuffle=perhaps", "valid boolean"),
        ("data.seed=-1", "greater than or equal to 0"),
        ("data.apply_chat_template_kwargs=3", "valid dictionary"),
        (f"{A}model.path=''", "at least 1 character"),
        (f"{ACTOR}optim.lr=0", "greater than 0"),
        (f"{ACTOR}optim.lr=nan", "finite number"),
        (f"{ACTOR}optim.lr=true", "a number is needed"),
        (f"{ACTOR}optim.betas=[0.9]", "too few values"),
        (f"{ACTOR}optim.betas=[0.9,x]", "valid number"),
        (f"{ACTOR}loss_agg_mode=token-median", "'token-mean'"),
        (f"{ACTOR}clip_ratio_c=1", "greater than 1"),
        (f"{A}rollout.max_num_seqs=8", "greater than or equal to 16"),
        (f"{A}rollout.temperature=0", "greater than 0"),
        ("reward.max_failure_ratio=2", "less than or equal to 1"),
        ("trainer.save_freq=-2", "greater than or equal to -1"),
        ("trainer.resume_mode=maybe", "'resume_path'"),
        ("deadlines.validate=0", "greater than 0"),
        ("ray.num_cpus=0", "greater than or equal to 2"),
        ("seed=-1", "greater than or equal to 0"),
    ],
)
def test_wrong_values(override, reason):
    key = override.split("=")[0]
    found = problems_of(override)
    assert list(found) == [key]
    assert reason in found[key].reason
    assert found[key].fix.startswith("give a valid value")


def test_missing_keys_are_named():
    found = {problem.path: problem for problem in examine(None).problems}
    for key in ("data.train_files", "data.val_files", f"{A}model.path"):
        assert found[key].reason == "it is missing and has no default"
    assert problems_of("~data.val_files")["data.val_files"].fix.startswith("set it: Files")
