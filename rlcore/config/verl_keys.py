"""verl's keys that rollflow has no field for: a table.

A key is *satisfied* when it asks for what happens anyway, or is a sizing hint of an engine that is
not in use: one notice. Otherwise it is *refused*, with reason and fix. First match wins; a trailing
`.*` stands for everything below.
"""

from dataclasses import dataclass
from typing import Any, Final


class AnyValue:
    """Every value is satisfied."""


ANY: Final = AnyValue()
LEAVE_OUT: Final = "leave it out"


@dataclass(frozen=True, kw_only=True, slots=True)
class VerlKey:
    """A key of verl's without a field of ours."""

    pattern: str
    satisfied: tuple[Any, ...] | AnyValue
    """Values that ask for what happens anyway."""
    reason: str
    fix: str
    but: str | None = None
    """Beginning of keys below the pattern of which it does not speak."""

    def matches(self, path: str) -> bool:
        """Whether this entry speaks about the dotted key `path`."""
        if self.but is not None and path.startswith(self.but):
            return False
        if self.pattern.endswith(".*"):
            return path.startswith(self.pattern[:-1]) or path == self.pattern[:-2]
        return path == self.pattern

    def is_satisfied_by(self, value: Any) -> bool:
        """Whether `value` asks for what happens anyway."""
        if isinstance(self.satisfied, AnyValue):
            return True
        return any(_unordered(value) == _unordered(item) for item in self.satisfied)


def _unordered(value: Any) -> Any:
    """Return a list of words as a set: what a checkpoint holds is in no order."""
    is_words = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)  # pyright: ignore[reportUnknownVariableType]
    return frozenset(value) if is_words else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


_A = "actor_rollout_ref."
_D = "distillation."
_TEACHER = "distillation.teacher_models.teacher_model."
_ONE_TEACHER = "there is one teacher, so nothing is routed"
_TEACHER_PLACE = "the teacher lies in the training workers and computes in their micro-batches"
_NO_TOOLS = "tools are functions of a Python file"
_TOOLS_KEY = f"set {_A}rollout.multi_turn.function_tool_path"
_NO_COV = "clip_cov and kl_cov are not among the losses"
_OTHER_ENGINE = "it sizes a GPU engine that is not in use"
_OTHER_SHARDING = "it sizes sharding over GPUs; training runs on the CPU"
_NO_PROFILER = "profilers are not there yet"
_MOVED = "verl moved it"

_FSDP_SIZING: Final = (
    "param_offload", "optimizer_offload", "offload_policy", "reshard_after_forward", "fsdp_size",
    "forward_prefetch", "use_orig_params", "use_torch_compile", "entropy_checkpointing",
    "entropy_from_logits_with_chunking", "entropy_from_logits_chunk_size", "forward_only",
    "ulysses_sequence_parallel_size", "strategy", "model_dtype", "dtype", "wrap_policy.*",
)  # fmt: skip
"""Keys of a `fsdp_config` that change speed and memory only."""


def _fsdp_rows(
    section: str, but: tuple[str, ...] = ()
) -> list[tuple[str, tuple[Any, ...] | AnyValue, str, str]]:
    keys = [key for key in _FSDP_SIZING if key not in but]
    return [(f"{section}.{key}", ANY, _OTHER_SHARDING, LEAVE_OUT) for key in keys]


_ROWS: list[tuple[str, tuple[Any, ...] | AnyValue, str, str]] = [
    # pattern, satisfied values, reason (also of the notice), fix
    # --- data
    ("data.val_batch_size", ANY, "the whole validation set is one batch", LEAVE_OUT),
    ("data.return_raw_chat", (True,), "agent loops always get the messages", LEAVE_OUT),
    ("data.return_raw_input_ids", (False,), "agent loops tokenise the messages", LEAVE_OUT),
    ("data.return_full_prompt", (False,), "agent loops tokenise the messages", LEAVE_OUT),
    ("data.dataloader_num_workers", ANY, "rows are read by the driver itself", LEAVE_OUT),
    ("data.filter_overlong_prompts_workers", ANY, "prompts are filtered by one process", LEAVE_OUT),
    ("data.validation_shuffle", (False,), "validation keeps the order of its file", LEAVE_OUT),
    ("data.trust_remote_code", (False,), "the tokenizer belongs to the model",
     f"set {_A}model.trust_remote_code"),
    ("data.tokenizer", (None,), "the tokenizer belongs to the model", f"set {_A}model.path"),
    ("data.use_shm", (False,), "files are read where they lie", LEAVE_OUT),
    ("data.datagen.*", (None,), "generated data is not there yet", "write your rows to parquet"),
    ("data.image_key", ("images",), "images are not there yet", LEAVE_OUT),
    ("data.video_key", ("videos",), "videos are not there yet", LEAVE_OUT),
    ("data.audio_key", ("audios",), "audio is not there yet", LEAVE_OUT),
    ("data.return_multi_modal_inputs", ANY, "there are no images to return", LEAVE_OUT),
    ("data.function_tool_path", (None,), _NO_TOOLS, _TOOLS_KEY),
    ("data.image_patch_size", ANY, "there are no images", LEAVE_OUT),
    ("data.mm_processor_kwargs.*", ({},), "there are no images", LEAVE_OUT),
    ("data.tool_config_path", (None,), _NO_TOOLS, _TOOLS_KEY),
    # --- model
    (f"{_A}hybrid_engine", (True,), "training and generation share the host", LEAVE_OUT),
    (f"{_A}nccl_timeout", ANY, "no NCCL group is made", "see deadlines"),
    (f"{_A}model.use_remove_padding", ANY, "it changes speed only; trajectories are packed",
     LEAVE_OUT),
    (f"{_A}model.enable_activation_offload", (False,), "activations stay where they are",
     LEAVE_OUT),
    (f"{_A}model.use_liger", (False,), "liger kernels need a GPU", LEAVE_OUT),
    (f"{_A}model.use_fused_kernels", (False,), "fused kernels need a GPU", LEAVE_OUT),
    (f"{_A}model.lora.*", (0, False), "it is Megatron's LoRA", f"set {_A}model.lora_rank"),
    (f"{_A}model.mtp.*", (False,), "multi-token prediction is not there yet", LEAVE_OUT),
    (f"{_A}model.fused_kernel_options.*", ANY, "fused kernels need a GPU", LEAVE_OUT),
    (f"{_A}model.tiled_mlp.*", (False, 4), "it changes memory only, of a GPU", LEAVE_OUT),
    (f"{_A}model.use_shm", (False,), "the model is read where it lies", LEAVE_OUT),
    (f"{_A}model.external_lib", (None,), "modules of yours have a key of their own",
     "list files in trainer.user_modules"),
    (f"{_A}model.override_config.attention_dropout", (0, None), "models are trained without "
     "dropout", "set it to 0"),
    (f"{_A}model.override_config.*", ({},), "the model's own config.json holds",
     "change config.json in the model folder"),
    (f"{_A}model.custom_chat_template", (None,), "the tokenizer's chat template holds",
     "change it in the model folder"),
    (f"{_A}model.tokenizer_path", (None,), "the tokenizer lies in the model folder", LEAVE_OUT),
    (f"{_A}model.hf_config_path", (None,), "config.json lies in the model folder", LEAVE_OUT),
    # --- actor
    (f"{_A}actor.strategy", ("fsdp", "fsdp2"), "parameters are sharded by FSDP2", LEAVE_OUT),
    (f"{_A}actor.ppo_micro_batch_size", (None,), "verl replaced it",
     f"set {_A}actor.ppo_micro_batch_size_per_gpu"),
    (f"{_A}actor.policy_loss.clip_cov_ratio", (0.0002,), _NO_COV, LEAVE_OUT),
    (f"{_A}actor.policy_loss.clip_cov_lb", (1.0,), _NO_COV, LEAVE_OUT),
    (f"{_A}actor.policy_loss.clip_cov_ub", (5.0,), _NO_COV, LEAVE_OUT),
    (f"{_A}actor.policy_loss.kl_cov_ratio", (0.0002,), _NO_COV, LEAVE_OUT),
    (f"{_A}actor.policy_loss.ppo_kl_coef", (0.1,), _NO_COV, LEAVE_OUT),
    (f"{_A}actor.policy_loss.dro_beta", (None,), "dro is not among the losses", LEAVE_OUT),
    (f"{_A}actor.policy_loss.rollout_correction.*", (), "correction has one place",
     "set algorithm.rollout_correction"),
    (f"{_A}actor.freeze_vision_tower", ANY, "there are no images", LEAVE_OUT),
    (f"{_A}actor.calculate_sum_pi_squared", (False,),
     "no estimator reads it (optimal_token_baseline)", LEAVE_OUT),
    (f"{_A}actor.entropy_from_logits_chunk_size", ANY, "it changes memory only", LEAVE_OUT),
    (f"{_A}actor.pad_to_length", (False,), "trajectories are packed, not padded", LEAVE_OUT),
    (f"{_A}actor.use_remove_padding", ANY, "it changes speed only; trajectories are packed",
     LEAVE_OUT),
    (f"{_A}actor.use_fused_kernels", (False,), "fused kernels need a GPU", LEAVE_OUT),
    (f"{_A}actor.use_rollout_log_probs", (False,), "correction has one place",
     "set algorithm.rollout_correction.bypass_mode"),
    (f"{_A}actor.qat.*", (False,), "quantised training is not there yet", LEAVE_OUT),
    (f"{_A}actor.use_torch_compile", ANY, "it changes speed only; nothing is compiled", LEAVE_OUT),
    (f"{_A}actor.ulysses_sequence_parallel_size", (1,), _OTHER_SHARDING, LEAVE_OUT),
    (f"{_A}actor.entropy_from_logits_with_chunking", ANY, "it changes memory only", LEAVE_OUT),
    (f"{_A}actor.entropy_checkpointing", ANY, "it changes memory only", LEAVE_OUT),
    (f"{_A}actor.use_prefix_grouper", ANY, "a group's prompt is always computed once", LEAVE_OUT),
    (f"{_A}actor.calculate_entropy", ANY, "entropy is always reported", LEAVE_OUT),
    (f"{_A}actor.fsdp_config.model_dtype", ("fp32", "float32"), "trained weights are float32",
     f"set {_A}actor.dtype for the type of the matrix products"),
    (f"{_A}actor.fsdp_config.dtype", ("bfloat16",), "autocast has a key of its own",
     f"set {_A}actor.dtype"),
    (f"{_A}actor.fsdp_config.full_determinism", (False,), "it has a key of its own",
     f"set {_A}rollout.full_determinism"),
    (f"{_A}actor.fsdp_config.seed", (42,), "it has a key of its own", "set seed"),
    (f"{_A}actor.fsdp_config.mixed_precision", (None,), "autocast has a key of its own",
     f"set {_A}actor.dtype"),
    *_fsdp_rows(f"{_A}actor.fsdp_config", but=("model_dtype", "dtype")),
    (f"{_A}actor.megatron.*", ANY, _OTHER_SHARDING, LEAVE_OUT),
    (f"{_A}actor.checkpoint.save_contents",
     (["model", "optimizer", "extra"], ["model", "optimizer", "extra", "hf_model"]),
     "a checkpoint is always whole", LEAVE_OUT),
    (f"{_A}actor.checkpoint.load_contents", (["model", "optimizer", "extra"],),
     "a checkpoint is always whole", LEAVE_OUT),
    (f"{_A}actor.checkpoint.async_save", (False,), "a checkpoint is whole when its step ends",
     LEAVE_OUT),
    (f"{_A}actor.router_replay.*", ("disabled", None), "router replay is not there yet",
     LEAVE_OUT),
    (f"{_A}actor.profiler.*", (False, None), _NO_PROFILER, LEAVE_OUT),
    (f"{_A}actor.optim.optimizer", ("AdamW",), "the optimizer is AdamW", LEAVE_OUT),
    (f"{_A}actor.optim.optimizer_impl", ("torch.optim",), "the optimizer is torch's", LEAVE_OUT),
    (f"{_A}actor.optim.override_optimizer_config", (None,), "AdamW's keys are lr, betas and "
     "weight_decay", LEAVE_OUT),
    (f"{_A}actor.optim.min_lr_ratio", (None, 0), "cosine falls to 0", LEAVE_OUT),
    (f"{_A}actor.optim.num_cycles", (0.5,), "cosine falls once", LEAVE_OUT),
    (f"{_A}actor.optim.total_training_steps", (-1, None), "the schedule is as long as the run",
     "set trainer.total_training_steps"),
    (f"{_A}actor.optim.zero_indexed_step", (True,), "schedules start at step 0", LEAVE_OUT),
    (f"{_A}actor.optim.warmup_style", (None,), "verl renamed it",
     f"set {_A}actor.optim.lr_scheduler_type"),
    (f"{_A}actor.optim.clip_grad", (1.0,), "clipping has a key of its own",
     f"set {_A}actor.grad_clip"),
    # --- reference model
    # (a reference model is trained by nobody: these size or trace it)
    (f"{_A}ref.strategy", ("fsdp", "fsdp2"), "parameters are sharded by FSDP2", LEAVE_OUT),
    (f"{_A}ref.log_prob_micro_batch_size", ANY,
     "log-probs are computed in the actor's micro-batches", LEAVE_OUT),
    (f"{_A}ref.log_prob_micro_batch_size_per_gpu", ANY,
     "log-probs are computed in the actor's micro-batches", LEAVE_OUT),
    (f"{_A}ref.log_prob_use_dynamic_bsz", ANY,
     "log-probs are computed in the actor's micro-batches", LEAVE_OUT),
    (f"{_A}ref.log_prob_max_token_len_per_gpu", ANY,
     "log-probs are computed in the actor's micro-batches", LEAVE_OUT),
    *_fsdp_rows(f"{_A}ref.fsdp_config"),
    (f"{_A}ref.megatron.*", ANY, _OTHER_SHARDING, LEAVE_OUT),
    (f"{_A}ref.ulysses_sequence_parallel_size", ANY, _OTHER_SHARDING, LEAVE_OUT),
    (f"{_A}ref.use_torch_compile", ANY, "it changes speed only; nothing is compiled", LEAVE_OUT),
    (f"{_A}ref.entropy_from_logits_with_chunking", ANY, "it changes memory only", LEAVE_OUT),
    (f"{_A}ref.profiler.*", (False, None, []), _NO_PROFILER, LEAVE_OUT),
    (f"{_A}ref.router_replay.*", ("disabled", None), "router replay is not there yet", LEAVE_OUT),
    # --- rollout
    (f"{_A}rollout.mode", ("async",), "engines are always servers", LEAVE_OUT),
    (f"{_A}rollout.cudagraph_capture_sizes", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.layered_summon", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.disable_log_stats", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.skip_tokenizer_init", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.engine_kwargs.*", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.log_prob_micro_batch_size", ANY,
     "log-probs are computed in the actor's micro-batches", LEAVE_OUT),
    (f"{_A}rollout.log_prob_micro_batch_size_per_gpu", ANY,
     "log-probs are computed in the actor's micro-batches", LEAVE_OUT),
    (f"{_A}rollout.log_prob_use_dynamic_bsz", ANY,
     "log-probs are computed in the actor's micro-batches", LEAVE_OUT),
    (f"{_A}rollout.log_prob_max_token_len_per_gpu", ANY,
     "log-probs are computed in the actor's micro-batches", LEAVE_OUT),
    (f"{_A}rollout.scheduling_policy", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.multi_stage_wake_up", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.moe_load_balance_metrics_interval", (0,), "there are no experts", LEAVE_OUT),
    (f"{_A}rollout.quantization_config_file", (None,), "quantised generation is not there yet",
     LEAVE_OUT),
    (f"{_A}rollout.enable_sleep_mode", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.multi_turn.num_repeat_rollouts", (None,), "verl does not read it either",
     f"set {_A}rollout.n"),
    (f"{_A}rollout.multi_turn.use_inference_chat_template", ANY, "verl does not read it either",
     LEAVE_OUT),
    (f"{_A}rollout.multi_turn.tokenization_sanity_check_mode", ANY,
     "model output is never re-tokenised, so there is nothing to compare", LEAVE_OUT),
    (f"{_A}rollout.multi_turn.enable", (True, False, None), "rows and the default agent loop "
     "choose; verl does not read it either", f"set {_A}rollout.agent.default_agent_loop"),
    (f"{_A}rollout.multi_turn.tool_config_path", (None,), _NO_TOOLS, _TOOLS_KEY),
    (f"{_A}rollout.multi_turn.interaction_config_path", (None,), "verl does not read it either",
     f"write an agent loop and list it in {_A}rollout.agent.agent_loop_config_path"),
    (f"{_A}rollout.prompt_length", (), "it is the data's", "set data.max_prompt_length"),
    (f"{_A}rollout.response_length", (), "it is the data's", "set data.max_response_length"),
    (f"{_A}rollout.do_sample", (True,), "training always samples", LEAVE_OUT),
    (f"{_A}rollout.ignore_eos", (False,), "EOS ends a response", LEAVE_OUT),
    (f"{_A}rollout.repetition_penalty", (1, 1.0), "the trainer could not reproduce it", LEAVE_OUT),
    (f"{_A}rollout.logprobs_mode", ("processed_logprobs",),
     "log-probs are of the temperature-scaled distribution", LEAVE_OUT),
    (f"{_A}rollout.agent.agent_loop_manager_class", (None,), "producers have one manager",
     LEAVE_OUT),
    (f"{_A}rollout.agent.custom_async_server.*", (None,), "verl does not read it either",
     LEAVE_OUT),
    (f"{_A}rollout.router_config_path", (None,), "routers of your own are not there yet",
     LEAVE_OUT),
    (f"{_A}rollout.enable_rollout_routing_replay", (False,), "router replay is not there yet",
     LEAVE_OUT),
    (f"{_A}rollout.over_sample_rate", (0,), "verl does not read it either", LEAVE_OUT),
    (f"{_A}rollout.quantization", (None,), "quantised generation is not there yet", LEAVE_OUT),
    (f"{_A}rollout.trace.*", (None, False), "tracing is not there yet", LEAVE_OUT),
    (f"{_A}rollout.prometheus.*", (None, False), "Prometheus metrics are not there yet",
     LEAVE_OUT),
    (f"{_A}rollout.disaggregation.*", (None, False), "it needs vLLM on GPUs", LEAVE_OUT),
    (f"{_A}rollout.profiler.*", (None, False), _NO_PROFILER, LEAVE_OUT),
    # --- algorithm
    ("algorithm.use_pf_ppo", (False,), "PF-PPO is not there yet", LEAVE_OUT),
    ("algorithm.pf_ppo.reweight_method", ("pow",), "PF-PPO is not there yet", LEAVE_OUT),
    ("algorithm.pf_ppo.weight_pow", (2.0,), "PF-PPO is not there yet", LEAVE_OUT),
    # --- critic, reward
    ("critic.ppo_micro_batch_size", (None,), "verl replaced it",
     "set critic.ppo_micro_batch_size_per_gpu"),
    ("critic.forward_micro_batch_size", (None,), "verl replaced it",
     "set critic.forward_micro_batch_size_per_gpu"),
    ("critic.optim.optimizer", ("AdamW",), "the optimizer is AdamW", LEAVE_OUT),
    ("critic.optim.optimizer_impl", ("torch.optim",), "the optimizer is torch's", LEAVE_OUT),
    ("critic.optim.override_optimizer_config", (None,), "AdamW's keys are lr, betas and "
     "weight_decay", LEAVE_OUT),
    ("critic.optim.min_lr_ratio", (None, 0), "cosine falls to 0", LEAVE_OUT),
    ("critic.optim.num_cycles", (0.5,), "cosine falls once", LEAVE_OUT),
    ("critic.optim.total_training_steps", (-1, None), "the schedule is as long as the run",
     "set trainer.total_training_steps"),
    ("critic.optim.zero_indexed_step", (True,), "schedules start at step 0", LEAVE_OUT),
    ("critic.optim.warmup_style", (None,), "verl renamed it",
     "set critic.optim.lr_scheduler_type"),
    ("critic.optim.clip_grad", (1.0,), "clipping has a key of its own", "set critic.grad_clip"),
    ("critic.strategy", ("fsdp", "fsdp2"), "parameters are sharded by FSDP2", LEAVE_OUT),
    ("critic.ulysses_sequence_parallel_size", (1,), _OTHER_SHARDING, LEAVE_OUT),
    *_fsdp_rows("critic.fsdp"),
    *_fsdp_rows("critic.fsdp_config"),
    ("critic.megatron.*", ANY, _OTHER_SHARDING, LEAVE_OUT),
    *_fsdp_rows("critic.model.fsdp_config"),
    ("critic.model.use_remove_padding", ANY, "it changes speed only; trajectories are packed",
     LEAVE_OUT),
    ("critic.model.enable_gradient_checkpointing", ANY,
     "it changes memory only; the critic does as the policy", LEAVE_OUT),
    ("critic.model.tokenizer_path", (None,), "the tokenizer lies in the model folder", LEAVE_OUT),
    ("critic.profiler.*", (False, None, []), _NO_PROFILER, LEAVE_OUT),
    ("critic.checkpoint.*", (["model", "optimizer", "extra"], False),
     "a checkpoint is always whole", LEAVE_OUT),
    ("critic.loss_scale_factor", (None,), "the critic follows the actor",
     f"set {_A}actor.loss_scale_factor"),
    *((f"reward.reward_model.rollout.{name}", ANY, _OTHER_ENGINE, LEAVE_OUT) for name in (
        "tensor_model_parallel_size", "data_parallel_size", "expert_parallel_size",
        "pipeline_model_parallel_size", "gpu_memory_utilization", "free_cache_engine",
        "enforce_eager", "max_num_batched_tokens", "max_model_len", "enable_chunked_prefill",
        "enable_prefix_caching", "cudagraph_capture_sizes", "skip_tokenizer_init", "load_format",
        "disable_log_stats")),
    ("reward.reward_model.rollout.engine_kwargs.*", ({}, None), _OTHER_ENGINE, LEAVE_OUT),
    ("reward.sandbox_fusion.max_concurrent", (64,), "no sandbox is called", LEAVE_OUT),
    ("reward.sandbox_fusion.memory_limit_mb", (1024,), "no sandbox is called", LEAVE_OUT),
    ("reward.sandbox_fusion.*", (None,), "no sandbox is called", LEAVE_OUT),
    ("custom_reward_function.path", (None,), _MOVED, "set reward.custom_reward_function.path"),
    ("custom_reward_function.name", (None, "compute_score"), _MOVED,
     "set reward.custom_reward_function.name"),
    ("custom_reward_function.reward_kwargs.*", (), _MOVED,
     "set reward.custom_reward_function.reward_kwargs"),
    ("reward_model.reward_manager", ("naive",), _MOVED, "set reward.reward_manager.name"),
    ("reward_model.reward_kwargs.*", (), _MOVED, "set reward.reward_kwargs"),
    ("reward_model.overlong_buffer.*", (), _MOVED,
     "set reward.reward_kwargs.overlong_buffer_cfg"),
    ("reward_model.enable", (False, None), _MOVED, "set reward.reward_model.enable"),
    ("reward_model.enable_resource_pool", (False, None), _MOVED,
     "set reward.reward_model.enable_resource_pool"),
    ("reward_model.model.path", (None,), _MOVED, "set reward.reward_model.model_path"),
    ("reward_model.strategy", (), "verl removed reward models as training workers",
     "set reward.reward_model, which is served like the policy"),
    ("reward_model.micro_batch_size_per_gpu", (), "verl removed reward models as training workers",
     "set reward.reward_model, which is served like the policy"),
    ("reward_model.launch_reward_fn_async", ANY, "rewards are always computed as sessions end",
     LEAVE_OUT),
    ("reward_model.*", (None,), _MOVED, "see reward"),
    ("sandbox_fusion.*", (None,), "no sandbox is called", LEAVE_OUT),
    # --- trainer
    ("trainer.balance_batch", ANY, "ranks are always balanced", LEAVE_OUT),
    ("trainer.use_v1", (True,), "verl's legacy trainer has no counterpart: its "
     "RayPPOTrainer and fit() are replaced by trainer.v1", "leave it out; a subclass of the legacy "
     "trainer becomes a trainer mode: @register_trainer in a file of trainer.user_modules"),
    ("trainer.default_hdfs_dir", (None,), "checkpoints are local files",
     "set trainer.default_local_dir"),
    ("trainer.del_local_ckpt_after_load", (False,), "a checkpoint outlives its loading", LEAVE_OUT),
    ("trainer.checkpoint_callback_class", (None,), "checkpoint callbacks are not there yet",
     LEAVE_OUT),
    ("trainer.v1.sync.*", ({},), "sync mode has no settings", LEAVE_OUT),
    ("trainer.esi_redundant_time", (0,), "verl does not read it either", LEAVE_OUT),
    ("trainer.ray_wait_register_center_timeout", ANY, "starts have a deadline of their own",
     "set deadlines.start"),
    # --- the rest
    ("hydra.*", (), "Hydra is not run: only its syntax is read", LEAVE_OUT),
    ("skip.rollout_tq.steps", ([],), "reuse of earlier rollouts is not there yet", LEAVE_OUT),
    ("skip.rollout_tq.action", ("cache",), "reuse of earlier rollouts is not there yet",
     LEAVE_OUT),
    ("skip.*", (False, None), "reuse of earlier rollouts is not there yet", LEAVE_OUT),
    (f"{_D}distillation_loss.topk", ANY, "the estimators read the sampled token alone", LEAVE_OUT),
    (f"{_D}distillation_loss.log_prob_min_clamp", (None,), "it is of the losses over the teacher's "
     "top tokens, which are not there", f"set {_D}distillation_loss.loss_max_clamp"),
    (f"{_D}distillation_loss.policy_loss_mode", ("vanilla",), "verl takes vanilla alone, too",
     LEAVE_OUT),
    (f"{_D}teacher_key", ANY, _ONE_TEACHER, LEAVE_OUT),
    (f"{_D}n_gpus_per_node", ANY, _TEACHER_PLACE, LEAVE_OUT),
    (f"{_D}nnodes", ANY, _TEACHER_PLACE, LEAVE_OUT),
    (f"{_D}num_workers", ANY, _TEACHER_PLACE, LEAVE_OUT),
    (f"{_TEACHER}key", ANY, _ONE_TEACHER, LEAVE_OUT),
    (f"{_TEACHER}num_replicas", ANY, _TEACHER_PLACE, LEAVE_OUT),
    (f"{_TEACHER}inference.temperature", (1, 1.0, None),
     "the teacher's distribution is scaled as the policy's", f"set {_A}rollout.temperature"),
    (f"{_TEACHER}inference.*", ANY, _TEACHER_PLACE, LEAVE_OUT),
    (f"{_D}teacher_model.*", (None, 0, False), _MOVED, f"set {_TEACHER}model_path"),
    ("global_profiler.save_path", ANY, "nothing is profiled", LEAVE_OUT),
    ("global_profiler.*", (None, False, []), _NO_PROFILER, LEAVE_OUT),
    ("ray_kwargs.ray_init.num_cpus", (None,), "the local cluster has a key of its own",
     "set ray.num_cpus"),
    ("ray_kwargs.ray_init.address", (None,), "the cluster has a key of its own",
     "set ray.address"),
    ("ray_kwargs.*", (None, {}), "Ray is started by the run", "see section ray"),

]  # fmt: skip

VERL_KEYS: tuple[VerlKey, ...] = (
    *(
        VerlKey(pattern=pattern, satisfied=satisfied, reason=reason, fix=fix)
        for pattern, satisfied, reason, fix in _ROWS
    ),
    VerlKey(
        pattern=f"{_D}teacher_models.*",
        satisfied=(None,),
        reason="there can be one teacher, and its name is teacher_model",
        fix=f"set {_TEACHER}model_path",
        but=_TEACHER,
    ),
)
