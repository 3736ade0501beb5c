"""The tree itself: defaults, freezing, derived values, round trips."""

import json
import os
import pickle

import pytest
from pydantic import ValidationError

from rlcore.config import PHASES, RunConfig
from rlcore.config.tree import all_fields, merge, put, remove, section_paths
from rlcore.trainer.phases import PHASE_NAMES

NEEDED = {
    "data": {"train_files": "train.parquet", "val_files": ["a.parquet", "b.parquet"]},
    "actor_rollout_ref": {
        "model": {"path": "models/x"},
        "actor": {"use_dynamic_bsz": True},
        "rollout": {"n": 8},
    },
}

# verl 0.9.1's defaults (verl-v1, section 5). The others of ours say in their description why not.
VERL_DEFAULTS = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.prompt_key": "prompt",
    "data.reward_fn_key": "data_source",
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "data.shuffle": True,
    "data.seed": None,
    "data.train_max_samples": -1,
    "data.val_max_samples": -1,
    "actor_rollout_ref.model.trust_remote_code": False,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": None,
    "actor_rollout_ref.actor.use_dynamic_bsz": False,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 16384,
    "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.clip_ratio_low": 0.2,
    "actor_rollout_ref.actor.clip_ratio_high": 0.2,
    "actor_rollout_ref.actor.clip_ratio_c": 3.0,
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.loss_scale_factor": None,
    "actor_rollout_ref.actor.policy_loss.loss_mode": "vanilla",
    "actor_rollout_ref.actor.entropy_coeff": 0,
    "actor_rollout_ref.actor.ppo_epochs": 1,
    "actor_rollout_ref.actor.shuffle": False,
    "actor_rollout_ref.actor.data_loader_seed": 42,
    "actor_rollout_ref.actor.grad_clip": 1.0,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.optim.weight_decay": 0.01,
    "actor_rollout_ref.actor.optim.lr_warmup_steps": -1,
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.0,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "constant",
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.temperature": 1.0,
    "actor_rollout_ref.rollout.top_p": 1,
    "actor_rollout_ref.rollout.top_k": -1,
    "actor_rollout_ref.rollout.full_determinism": False,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
    "actor_rollout_ref.rollout.val_kwargs.temperature": 0,
    "actor_rollout_ref.rollout.val_kwargs.n": 1,
    "actor_rollout_ref.rollout.val_kwargs.do_sample": False,
    "actor_rollout_ref.rollout.agent.default_agent_loop": "single_turn_agent",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path": None,
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": None,
    "actor_rollout_ref.rollout.multi_turn.max_user_turns": None,
    "actor_rollout_ref.rollout.multi_turn.max_parallel_calls": 1,
    "actor_rollout_ref.rollout.multi_turn.max_tool_response_length": 256,
    "actor_rollout_ref.rollout.multi_turn.tool_response_truncate_side": "middle",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path": None,
    "actor_rollout_ref.rollout.multi_turn.format": "hermes",
    "actor_rollout_ref.rollout.checkpoint_engine.backend": "naive",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "reward.custom_reward_function.path": None,
    "reward.custom_reward_function.name": "compute_score",
    "reward.reward_manager.name": "naive",
    "reward.max_concurrent": 1,
    "trainer.total_epochs": 30,
    "trainer.total_training_steps": None,
    "trainer.nnodes": 1,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
    "trainer.val_only": False,
    "trainer.resume_mode": "auto",
    "trainer.resume_from_path": None,
    "trainer.max_actor_ckpt_to_keep": None,
    "trainer.log_val_generations": 0,
    "trainer.v1.trainer_mode": "sync",
}


def test_defaults_are_verls():
    defaults = {
        path: field.get_default(call_default_factory=True)
        for path, field in all_fields().items()
        if path in VERL_DEFAULTS
    }
    assert defaults == VERL_DEFAULTS


def test_every_key_has_a_description():
    assert [path for path, field in all_fields().items() if not field.description] == []


def test_only_files_and_model_have_no_default():
    required = [path for path, field in all_fields().items() if field.is_required()]
    assert required == ["data.train_files", "data.val_files", "actor_rollout_ref.model.path"]


def test_a_lone_path_is_a_tuple_of_one():
    config = RunConfig.model_validate(NEEDED)
    assert config.data.train_files == ("train.parquet",)
    assert config.data.val_files == ("a.parquet", "b.parquet")


def test_home_is_expanded_in_paths():
    home = os.path.expanduser("~")
    tree = put(put(NEEDED, "data.train_files", ["~/a", "b~"]), "trainer.runs_root", "~/runs")
    config = RunConfig.model_validate(put(tree, "actor_rollout_ref.model.path", "~"))
    assert config.data.train_files == (f"{home}/a", "b~")
    assert config.trainer.runs_root == f"{home}/runs"
    assert config.actor_rollout_ref.model.path == home


def test_sections_are_frozen_and_closed():
    config = RunConfig.model_validate(NEEDED)
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 1
    with pytest.raises(ValidationError, match="Extra inputs"):
        RunConfig.model_validate({**NEEDED, "sead": 1})


def test_round_trips_through_json_and_pickle():
    config = RunConfig.model_validate({**NEEDED, "deadlines": {"validate": 7, "first_call": 9}})
    assert (
        RunConfig.model_validate(json.loads(json.dumps(config.model_dump(mode="json")))) == config
    )
    assert pickle.loads(pickle.dumps(config)) == config


def test_clip_ratio_alone_sets_both_sides():
    actor = {"use_dynamic_bsz": True, "clip_ratio": 0.3}
    tree = merge(NEEDED, {"actor_rollout_ref": {"actor": actor}})
    read = RunConfig.model_validate(tree).actor_rollout_ref.actor
    assert (read.clip_ratio_low, read.clip_ratio_high) == (0.3, 0.3)
    tree = put(tree, "actor_rollout_ref.actor.clip_ratio_high", 0.28)
    read = RunConfig.model_validate(tree).actor_rollout_ref.actor
    assert (read.clip_ratio_low, read.clip_ratio_high) == (0.3, 0.28)


def test_seeds_follow_the_runs_seed():
    config = RunConfig.model_validate({**NEEDED, "seed": 5})
    assert (config.data_seed, config.rollout_seed) == (5, 5)
    tree = put(put(NEEDED, "data.seed", 1), "actor_rollout_ref.rollout.seed", 0)
    config = RunConfig.model_validate({**tree, "seed": 5})
    assert (config.data_seed, config.rollout_seed) == (1, 0)


def test_derived_sizes():
    tree = put(put(NEEDED, "data.train_batch_size", 12), "data.max_response_length", 100)
    tree = put(tree, "actor_rollout_ref.actor", {"ppo_mini_batch_size": 4, "ppo_epochs": 2})
    config = RunConfig.model_validate(tree)
    assert config.num_trajectories == 96  # 12 prompts x 8 sessions
    assert config.num_optimizer_steps == 6  # 2 epochs x 12 / 4
    assert config.max_model_len == 612  # 512 + 100


def test_total_steps_are_given_or_follow_from_epochs():
    config = RunConfig.model_validate(put(NEEDED, "trainer.total_epochs", 3))
    assert config.total_steps(2500) == 6  # 3 epochs x (2500 // 1024 = 2)
    config = RunConfig.model_validate(put(NEEDED, "trainer.total_training_steps", 4))
    assert config.total_steps(2500) == 4


def test_run_folder_is_the_local_dir_or_below_the_root():
    config = RunConfig.model_validate(NEEDED)
    assert str(config.run_folder("r-1")) == "runs/r-1"
    config = RunConfig.model_validate(put(NEEDED, "trainer.default_local_dir", "/x/y"))
    assert str(config.run_folder("r-1")) == "/x/y"


def test_every_phase_has_a_deadline_key():
    values = {phase: float(number) for number, phase in enumerate(PHASES, start=1)}
    deadlines = RunConfig.model_validate({**NEEDED, "deadlines": values}).deadlines
    assert {phase: deadlines.for_phase(phase) for phase in PHASES} == values
    assert RunConfig.model_validate(NEEDED).deadlines.for_phase("validate") is None
    assert deadlines.for_phase("phase_of_a_subclass") is None
    assert PHASES == PHASE_NAMES


def test_tree_functions_leave_their_arguments_alone():
    tree = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    before = json.dumps(tree)
    assert merge(tree, {"a": {"c": {"x": 9}}}) == {"a": {"b": 1, "c": {"d": 2, "x": 9}}, "e": 3}
    assert put(tree, "a.c", [1]) == {"a": {"b": 1, "c": [1]}, "e": 3}
    assert put(tree, "e.f", 1) == {"a": {"b": 1, "c": {"d": 2}}, "e": {"f": 1}}
    assert remove(tree, "a.c.d") == {"a": {"b": 1, "c": {}}, "e": 3}
    assert remove(tree, "a.z.d") == tree
    assert remove(tree, "e.f") == tree
    assert json.dumps(tree) == before


def test_sections_are_known():
    assert {"data", "actor_rollout_ref", "actor_rollout_ref.actor.optim"} <= section_paths()
    assert "data.apply_chat_template_kwargs" not in section_paths()
