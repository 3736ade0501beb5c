"""The tree itself: defaults, freezing, derived values, round trips."""

import json
import os
import pickle

import pytest
from pydantic import ValidationError

from rlcore.config import PHASES, RunConfig
from rlcore.config.deviations import DEVIATIONS
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

# verl 0.9.1's defaults (verl-v1, section 5). A key that is not here has a row among the deviations,
# says "(ours)" in its description, or is in a section of ours.
OURS = ("deadlines.", "ray.")
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
    "data.gen_batch_size": None,
    "data.apply_chat_template_kwargs": {},
    "data.custom_cls.name": None,
    "data.sampler.class_name": None,
    "actor_rollout_ref.model.lora_rank": 0,
    "actor_rollout_ref.model.lora_alpha": 16,
    "actor_rollout_ref.model.target_modules": ("all-linear",),
    "actor_rollout_ref.model.exclude_modules": None,
    "actor_rollout_ref.model.lora_adapter_path": None,
    "actor_rollout_ref.actor.tau_pos": 1.0,
    "actor_rollout_ref.actor.tau_neg": 1.05,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
    "actor_rollout_ref.actor.optim.betas": (0.9, 0.999),
    "actor_rollout_ref.ref.model.path": None,
    "actor_rollout_ref.rollout.dtype": "bfloat16",
    "actor_rollout_ref.rollout.val_kwargs.top_p": 1.0,
    "actor_rollout_ref.rollout.val_kwargs.top_k": -1,
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": 2048,
    "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs": {},
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module": None,
    "actor_rollout_ref.rollout.nnodes": 0,
    "actor_rollout_ref.rollout.data_parallel_size": 1,
    "actor_rollout_ref.rollout.expert_parallel_size": 1,
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": 1,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
    "actor_rollout_ref.rollout.max_num_batched_tokens": 8192,
    "actor_rollout_ref.rollout.max_model_len": None,
    "actor_rollout_ref.rollout.enforce_eager": False,
    "actor_rollout_ref.rollout.free_cache_engine": True,
    "actor_rollout_ref.rollout.enable_chunked_prefill": True,
    "actor_rollout_ref.rollout.enable_prefix_caching": True,
    "actor_rollout_ref.rollout.load_format": "dummy",
    "algorithm.gdpo_reward_keys": None,
    "algorithm.gdpo_reward_weights": None,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.filter_groups.enable": False,
    "algorithm.filter_groups.metric": "reward",
    "algorithm.filter_groups.max_inflight_gen_batches": 1,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "algorithm.rollout_correction.rollout_is_batch_normalize": False,
    "algorithm.rollout_correction.rollout_rs": None,
    "algorithm.rollout_correction.rollout_rs_threshold": None,
    "algorithm.rollout_correction.bypass_mode": False,
    "algorithm.rollout_correction.loss_type": "ppo_clip",
    "critic.enable": None,
    "critic.model.trust_remote_code": False,
    "critic.optim.lr": 1e-05,
    "critic.optim.betas": (0.9, 0.999),
    "critic.optim.weight_decay": 0.01,
    "critic.optim.lr_warmup_steps": -1,
    "critic.optim.lr_warmup_steps_ratio": 0.0,
    "critic.optim.lr_scheduler_type": "constant",
    "critic.ppo_mini_batch_size": None,
    "critic.ppo_micro_batch_size_per_gpu": None,
    "critic.use_dynamic_bsz": None,
    "critic.ppo_max_token_len_per_gpu": 32768,
    "critic.forward_max_token_len_per_gpu": None,
    "critic.forward_micro_batch_size_per_gpu": None,
    "critic.ppo_epochs": None,
    "critic.shuffle": None,
    "critic.data_loader_seed": 42,
    "critic.cliprange_value": 0.5,
    "critic.loss_agg_mode": None,
    "critic.grad_clip": 1.0,
    "reward.custom_reward_function.reward_kwargs": {},
    "reward.reward_manager.source": "register",
    "reward.reward_manager.module.path": None,
    "reward.reward_manager.module.name": "custom_reward_manager",
    "reward.reward_kwargs.overlong_buffer_cfg.enable": False,
    "reward.reward_kwargs.overlong_buffer_cfg.len": 0,
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": 0.0,
    "reward.reward_kwargs.overlong_buffer_cfg.log": False,
    "reward.reward_kwargs.max_resp_len": None,
    "reward.reward_model.enable": False,
    "reward.reward_model.enable_resource_pool": False,
    "reward.reward_model.nnodes": 0,
    "reward.reward_model.n_gpus_per_node": 8,
    "reward.reward_model.model_path": None,
    "reward.reward_model.rollout.dtype": "bfloat16",
    "reward.reward_model.rollout.prompt_length": 2048,
    "reward.reward_model.rollout.response_length": 2048,
    "distillation.enabled": False,
    "distillation.teacher_models.teacher_model.model_path": None,
    "distillation.distillation_loss.loss_mode": "k3",
    "distillation.distillation_loss.use_task_rewards": True,
    "distillation.distillation_loss.distillation_loss_coef": 1.0,
    "distillation.distillation_loss.loss_max_clamp": None,
    "distillation.distillation_loss.use_policy_gradient": False,
    "distillation.distillation_loss.clip_ratio": 0.2,
    "distillation.distillation_loss.clip_ratio_low": 0.2,
    "distillation.distillation_loss.clip_ratio_high": 0.2,
    "reward.max_rpm": None,
    "reward.max_tpm": None,
    "reward.estimated_tokens_per_request": 2000,
    "transfer_queue.enable": False,
    "transfer_queue.backend.storage_backend": "SimpleStorage",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 8,
    "transfer_queue.backend.MooncakeStore.auto_init": False,
    "transfer_queue.backend.MooncakeStore.metadata_server": "localhost:50123",
    "transfer_queue.backend.MooncakeStore.master_server_address": "localhost:50124",
    "transfer_queue.backend.MooncakeStore.local_hostname": "localhost",
    "transfer_queue.backend.MooncakeStore.protocol": "tcp",
    "transfer_queue.backend.MooncakeStore.global_segment_size": 4294967296,
    "transfer_queue.backend.MooncakeStore.local_buffer_size": 1073741824,
    "transfer_queue.backend.MooncakeStore.device_name": "",
    "transfer_queue.metrics.enabled": False,
    "transfer_queue.metrics.port": 0,
    "trainer.max_critic_ckpt_to_keep": None,
    "trainer.critic_warmup": 0,
    "trainer.rollout_data_dir": None,
    "trainer.validation_data_dir": None,
    "trainer.v1.colocate_async.num_warmup_batches": 1,
    "trainer.v1.separate_async.num_warmup_batches": 1,
    "trainer.v1.separate_async.hybrid_rollout.enable_switch": False,
    "trainer.v1.separate_async.hybrid_rollout.switch_threshold_ratio": 0.4,
    "trainer.v1.separate_async.hybrid_rollout.adaptive_switch_threshold": True,
    "trainer.v1.separate_async.hybrid_rollout.switch_threshold_step_up": 0.05,
    "trainer.v1.separate_async.hybrid_rollout.switch_threshold_step_down": 0.03,
    "trainer.v1.separate_async.hybrid_rollout.switch_threshold_release_steps": 2,
    "trainer.v1.separate_async.hybrid_rollout.switch_cost_window_size": 3,
    "trainer.v1.sampler.max_off_policy_threshold": 8,
    "trainer.v1.sampler.custom_sampler.path": None,
    "trainer.v1.sampler.custom_sampler.name": None,
    "trainer.v1.sampler.sampler_kwargs": {},
}


def test_defaults_are_verls():
    defaults = {
        path: field.get_default(call_default_factory=True)
        for path, field in all_fields().items()
        if path in VERL_DEFAULTS
    }
    assert defaults == VERL_DEFAULTS


def test_every_other_key_says_why_its_default_is_not_verls():
    deviates = {key for row in DEVIATIONS for key in row.keys}
    unexplained = [
        path
        for path, field in all_fields().items()
        if path not in {*VERL_DEFAULTS, *deviates}
        and not path.startswith(OURS)
        and not field.is_required()
        and "(ours" not in field.description
    ]
    assert unexplained == []


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
