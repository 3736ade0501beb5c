"""verl's keys that rollflow has no field for, and values of its keys that it does not do.

A key is *satisfied* when it asks for what happens anyway, or is a sizing hint of an engine that is
not in use: one notice. Otherwise it is *refused*, with reason and fix. First match wins; a trailing
`.*` stands for everything below.
"""

from dataclasses import dataclass
from typing import Any, Final


class _Any:
    """Every value is satisfied."""


ANY: Final = _Any()
LEAVE_OUT: Final = "leave it out"


@dataclass(frozen=True, kw_only=True, slots=True)
class VerlKey:
    """A key of verl's without a field of ours."""

    pattern: str
    satisfied: tuple[Any, ...] | _Any
    """Values that ask for what happens anyway."""
    reason: str
    fix: str

    def matches(self, path: str) -> bool:
        """Whether this entry speaks about the dotted key `path`."""
        if self.pattern.endswith(".*"):
            return path.startswith(self.pattern[:-1]) or path == self.pattern[:-2]
        return path == self.pattern

    def is_satisfied_by(self, value: Any) -> bool:
        """Whether `value` asks for what happens anyway."""
        return isinstance(self.satisfied, _Any) or value in self.satisfied


_A = "actor_rollout_ref."
_NO_CRITIC = "there is no critic: grpo needs none"
_NO_KL = "no KL penalty is computed"
_NO_CORRECTION = "sync mode is on-policy and corrects nothing"
_NO_TOOLS = "tools and several turns are not there yet"
_NO_LORA = "all weights are trained; LoRA is not there yet"
_NO_FILTER = "groups are not filtered by their rewards"
_OTHER_ENGINE = "it sizes a GPU engine that is not in use"
_OTHER_SHARDING = "it sizes sharding over GPUs; there is one rank"
_NO_PROFILER = "profilers are not there yet"
_NO_RM = "reward models are not there yet"
_SYNC = "it has no effect with trainer.v1.trainer_mode=sync"
_MOVED = "verl moved it"

_ROWS: list[tuple[str, tuple[Any, ...] | _Any, str, str]] = [
    # pattern, satisfied values, reason (also of the notice), fix
    # --- data
    ("data.gen_batch_size", (None,), "a step's prompts are fed at once", LEAVE_OUT),
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
    ("data.custom_cls.*", (None,), "data sets of your own are not there yet",
     "write your rows to parquet"),
    ("data.sampler.*", (None,), "samplers of your own are not there yet", "use data.shuffle"),
    ("data.datagen.*", (None,), "generated data is not there yet", "write your rows to parquet"),
    ("data.image_key", ("images",), "images are not there yet", LEAVE_OUT),
    ("data.video_key", ("videos",), "videos are not there yet", LEAVE_OUT),
    ("data.audio_key", ("audios",), "audio is not there yet", LEAVE_OUT),
    ("data.return_multi_modal_inputs", ANY, "there are no images to return", LEAVE_OUT),
    ("data.tool_config_path", (None,), _NO_TOOLS, LEAVE_OUT),
    # --- model
    (f"{_A}hybrid_engine", (True,), "training and generation share the host", LEAVE_OUT),
    (f"{_A}nccl_timeout", ANY, "no NCCL group is made", "see deadlines"),
    (f"{_A}model.lora_rank", (0,), _NO_LORA, LEAVE_OUT),
    (f"{_A}model.lora_alpha", (16,), _NO_LORA, LEAVE_OUT),
    (f"{_A}model.target_modules", ("all-linear",), _NO_LORA, LEAVE_OUT),
    (f"{_A}model.exclude_modules", (None,), _NO_LORA, LEAVE_OUT),
    (f"{_A}model.lora_adapter_path", (None,), _NO_LORA, LEAVE_OUT),
    (f"{_A}model.use_remove_padding", ANY, "it changes speed only; trajectories are packed",
     LEAVE_OUT),
    (f"{_A}model.enable_gradient_checkpointing", ANY,
     "it changes memory only; activations are kept", "lower ppo_max_token_len_per_gpu"),
    (f"{_A}model.enable_activation_offload", (False,), "activations stay where they are",
     LEAVE_OUT),
    (f"{_A}model.use_liger", (False,), "liger kernels need a GPU", LEAVE_OUT),
    (f"{_A}model.use_fused_kernels", (False,), "fused kernels need a GPU", LEAVE_OUT),
    (f"{_A}model.use_shm", (False,), "the model is read where it lies", LEAVE_OUT),
    (f"{_A}model.external_lib", (None,), "modules of yours have a key of their own",
     "list files in trainer.user_modules"),
    (f"{_A}model.override_config", ({},), "the model's own config.json holds",
     "change config.json in the model folder"),
    (f"{_A}model.custom_chat_template", (None,), "the tokenizer's chat template holds",
     "change it in the model folder"),
    (f"{_A}model.tokenizer_path", (None,), "the tokenizer lies in the model folder", LEAVE_OUT),
    (f"{_A}model.hf_config_path", (None,), "config.json lies in the model folder", LEAVE_OUT),
    # --- actor
    (f"{_A}actor.strategy", ("fsdp", "fsdp2"), "one rank needs no sharding", LEAVE_OUT),
    (f"{_A}actor.ppo_micro_batch_size", (None,), "verl replaced it",
     f"set {_A}actor.ppo_micro_batch_size_per_gpu"),
    (f"{_A}actor.use_kl_loss", (False,), _NO_KL, LEAVE_OUT),
    (f"{_A}actor.kl_loss_coef", (0.001, 0), _NO_KL, LEAVE_OUT),
    (f"{_A}actor.kl_loss_type", ("low_var_kl",), _NO_KL, LEAVE_OUT),
    (f"{_A}actor.policy_loss.*", (None,), "it has no effect with loss_mode=vanilla", LEAVE_OUT),
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
    (f"{_A}actor.fsdp_config.*", ANY, _OTHER_SHARDING, LEAVE_OUT),
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
    (f"{_A}actor.optim.warmup_style", (None,), "verl renamed it",
     f"set {_A}actor.optim.lr_scheduler_type"),
    (f"{_A}actor.optim.clip_grad", (1.0,), "clipping has a key of its own",
     f"set {_A}actor.grad_clip"),
    # --- reference
    (f"{_A}ref.*", ANY, "no reference model is loaded, since no KL is asked for", LEAVE_OUT),
    # --- rollout
    (f"{_A}rollout.mode", ("async",), "engines are always servers", LEAVE_OUT),
    (f"{_A}rollout.tensor_model_parallel_size", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.data_parallel_size", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.expert_parallel_size", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.pipeline_model_parallel_size", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.gpu_memory_utilization", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.max_num_batched_tokens", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.enforce_eager", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.cudagraph_capture_sizes", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.free_cache_engine", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.load_format", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.layered_summon", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.enable_chunked_prefill", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.enable_prefix_caching", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.disable_log_stats", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.skip_tokenizer_init", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.engine_kwargs.*", ANY, _OTHER_ENGINE, LEAVE_OUT),
    (f"{_A}rollout.max_model_len", (None,), "it is max_prompt_length + max_response_length",
     "set data.max_prompt_length and data.max_response_length"),
    (f"{_A}rollout.log_prob_micro_batch_size", ANY,
     "log-probs are computed in the actor's micro-batches", LEAVE_OUT),
    (f"{_A}rollout.log_prob_micro_batch_size_per_gpu", ANY,
     "log-probs are computed in the actor's micro-batches", LEAVE_OUT),
    (f"{_A}rollout.log_prob_use_dynamic_bsz", ANY,
     "log-probs are computed in the actor's micro-batches", LEAVE_OUT),
    (f"{_A}rollout.log_prob_max_token_len_per_gpu", ANY,
     "log-probs are computed in the actor's micro-batches", LEAVE_OUT),
    (f"{_A}rollout.nnodes", (0,), "generation shares the training host", LEAVE_OUT),
    (f"{_A}rollout.n_gpus_per_node", (0, 1), "generation shares the training host",
     f"set {_A}rollout.num_replicas"),
    (f"{_A}rollout.prompt_length", (), "it is the data's", "set data.max_prompt_length"),
    (f"{_A}rollout.response_length", (), "it is the data's", "set data.max_response_length"),
    (f"{_A}rollout.do_sample", (True,), "training always samples", LEAVE_OUT),
    (f"{_A}rollout.ignore_eos", (False,), "EOS ends a response", LEAVE_OUT),
    (f"{_A}rollout.repetition_penalty", (1, 1.0), "the trainer could not reproduce it", LEAVE_OUT),
    (f"{_A}rollout.logprobs_mode", ("processed_logprobs",),
     "log-probs are of the temperature-scaled distribution", LEAVE_OUT),
    (f"{_A}rollout.multi_turn.*", (False, None), _NO_TOOLS, LEAVE_OUT),
    (f"{_A}rollout.agent.agent_loop_config_path", (None,),
     "agent loops from a YAML list are not there yet",
     f"register the loop in a file of trainer.user_modules and name it in {_A}rollout.agent."
     "default_agent_loop or in the row's agent_name"),
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
    ("algorithm.kl_penalty", ("kl",), _NO_KL, LEAVE_OUT),
    ("algorithm.kl_ctrl.type", ("fixed",), _NO_KL, LEAVE_OUT),
    ("algorithm.kl_ctrl.kl_coef", (0.001, 0), _NO_KL, LEAVE_OUT),
    ("algorithm.kl_ctrl.horizon", (10000,), _NO_KL, LEAVE_OUT),
    ("algorithm.kl_ctrl.target_kl", (0.1,), _NO_KL, LEAVE_OUT),
    ("algorithm.filter_groups.enable", (False,), _NO_FILTER, LEAVE_OUT),
    ("algorithm.filter_groups.metric", (None, "reward"), _NO_FILTER, LEAVE_OUT),
    ("algorithm.filter_groups.max_inflight_gen_batches", (1,), _NO_FILTER, LEAVE_OUT),
    ("algorithm.filter_groups.max_num_gen_batches", (0,), _NO_FILTER, LEAVE_OUT),
    ("algorithm.use_pf_ppo", (False,), "PF-PPO is not there yet", LEAVE_OUT),
    ("algorithm.pf_ppo.reweight_method", ("pow",), "PF-PPO is not there yet", LEAVE_OUT),
    ("algorithm.pf_ppo.weight_pow", (2.0,), "PF-PPO is not there yet", LEAVE_OUT),
    ("algorithm.gdpo_reward_keys", (None,), "gdpo is not there yet", LEAVE_OUT),
    ("algorithm.gdpo_reward_weights", (None,), "gdpo is not there yet", LEAVE_OUT),
    ("algorithm.rollout_correction.rollout_is", (None,), _NO_CORRECTION, LEAVE_OUT),
    ("algorithm.rollout_correction.rollout_is_threshold", (2.0,), _NO_CORRECTION, LEAVE_OUT),
    ("algorithm.rollout_correction.rollout_rs", (None,), _NO_CORRECTION, LEAVE_OUT),
    ("algorithm.rollout_correction.rollout_rs_threshold", (None,), _NO_CORRECTION, LEAVE_OUT),
    ("algorithm.rollout_correction.rollout_is_batch_normalize", (False,), _NO_CORRECTION,
     LEAVE_OUT),
    ("algorithm.rollout_correction.bypass_mode", (False,), _NO_CORRECTION, LEAVE_OUT),
    ("algorithm.rollout_correction.loss_type", ("ppo_clip",), _NO_CORRECTION, LEAVE_OUT),
    # --- critic, reward
    ("critic.enable", (False, None), _NO_CRITIC, LEAVE_OUT),
    ("critic.*", (), _NO_CRITIC, LEAVE_OUT),
    ("reward.num_workers", ANY, "rewards are computed by the agent loop workers", LEAVE_OUT),
    ("reward.reward_manager.source", ("register",), "reward managers of your own are not there "
     "yet", "set reward.custom_reward_function"),
    ("reward.reward_manager.name", ("naive",), "other reward managers are not there yet",
     LEAVE_OUT),
    ("reward.reward_manager.module.*", (None,), "reward managers of your own are not there yet",
     "set reward.custom_reward_function"),
    ("reward.reward_model.enable", (False,), _NO_RM, LEAVE_OUT),
    ("reward.reward_model.enable_resource_pool", (False,), _NO_RM, LEAVE_OUT),
    ("reward.reward_model.*", (None,), _NO_RM, LEAVE_OUT),
    ("reward.reward_kwargs.*", (), "settings of reward managers are not there yet",
     "set reward.custom_reward_function.reward_kwargs"),
    ("reward.sandbox_fusion.*", (None,), "no sandbox is called", LEAVE_OUT),
    ("custom_reward_function.*", (None,), _MOVED, "set reward.custom_reward_function"),
    ("reward_model.enable", (False,), _NO_RM, LEAVE_OUT),
    ("reward_model.reward_manager", ("naive",), "other reward managers are not there yet",
     LEAVE_OUT),
    ("reward_model.*", (), _MOVED, "see reward"),
    # --- trainer
    ("trainer.balance_batch", ANY, "one rank has nothing to balance", LEAVE_OUT),
    ("trainer.use_v1", (True,), "verl's legacy trainer has no counterpart", LEAVE_OUT),
    ("trainer.critic_warmup", (0,), _NO_CRITIC, LEAVE_OUT),
    ("trainer.max_critic_ckpt_to_keep", (None,), _NO_CRITIC, LEAVE_OUT),
    ("trainer.default_hdfs_dir", (None,), "checkpoints are local files",
     "set trainer.default_local_dir"),
    ("trainer.del_local_ckpt_after_load", (False,), "a checkpoint outlives its loading", LEAVE_OUT),
    ("trainer.checkpoint_callback_class", (None,), "checkpoint callbacks are not there yet",
     LEAVE_OUT),
    ("trainer.rollout_data_dir", (None,), "dumps of all responses are not there yet", LEAVE_OUT),
    ("trainer.validation_data_dir", (None,), "generations lie in the run folder",
     "set trainer.log_val_generations"),
    ("trainer.esi_redundant_time", (0,), "verl does not read it either", LEAVE_OUT),
    ("trainer.ray_wait_register_center_timeout", ANY, "starts have a deadline of their own",
     "set deadlines.start"),
    ("trainer.v1.colocate_async.*", (), _SYNC, LEAVE_OUT),
    ("trainer.v1.separate_async.*", (), _SYNC, LEAVE_OUT),
    ("trainer.v1.sampler.max_off_policy_threshold", ANY, "sync mode has staleness 0", LEAVE_OUT),
    ("trainer.v1.sampler.max_off_policy_strategy", ("drop", "wait"), "sync mode has staleness 0",
     LEAVE_OUT),
    ("trainer.v1.sampler.sync_refill_failed_groups", (True,),
     "failed groups are always dropped and replaced", LEAVE_OUT),
    ("trainer.v1.sampler.custom_sampler.*", (None,), "samplers of your own are not there yet",
     LEAVE_OUT),
    ("trainer.v1.sampler.sampler_kwargs.*", ({},), "samplers of your own are not there yet",
     LEAVE_OUT),
    # --- the rest
    ("transfer_queue.enable", (True,), "rows always travel through TransferQueue", LEAVE_OUT),
    ("transfer_queue.backend.storage_backend", ("SimpleStorage",),
     "other storage back ends are not there yet", LEAVE_OUT),
    ("transfer_queue.backend.SimpleStorage.*", ANY, "the storage is sized by the run", LEAVE_OUT),
    ("transfer_queue.backend.MooncakeStore.*", ANY, "it sizes a storage that is not in use",
     LEAVE_OUT),
    ("transfer_queue.metrics.enabled", (False,), "Prometheus metrics are not there yet",
     LEAVE_OUT),
    ("transfer_queue.metrics.port", (0,), "Prometheus metrics are not there yet", LEAVE_OUT),
    ("skip.*", (False, None), "reuse of earlier rollouts is not there yet", LEAVE_OUT),
    ("distillation.*", (False, None), "distillation is not there yet", LEAVE_OUT),
    ("global_profiler.*", (None, False, []), _NO_PROFILER, LEAVE_OUT),
    ("ray_kwargs.ray_init.num_cpus", (None,), "the local cluster has a key of its own",
     "set ray.num_cpus"),
    ("ray_kwargs.ray_init.address", (None,), "the cluster has a key of its own",
     "set ray.address"),
    ("ray_kwargs.*", (None, {}), "Ray is started by the run", "see section ray"),
]  # fmt: skip

VERL_KEYS: tuple[VerlKey, ...] = tuple(
    VerlKey(pattern=pattern, satisfied=satisfied, reason=reason, fix=fix)
    for pattern, satisfied, reason, fix in _ROWS
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RefusedValue:
    """Values of an honoured key that mean something in verl and that rollflow does not do."""

    values: tuple[Any, ...] | _Any
    reason: str
    fix: str

    def names(self, value: Any) -> bool:
        """Whether `value`, or an item of it, is one of these values."""
        items: list[Any] = list(value) if isinstance(value, list | tuple) else [value]  # pyright: ignore[reportUnknownArgumentType]
        return isinstance(self.values, _Any) or any(item in self.values for item in items)


REFUSED_VALUES: dict[str, RefusedValue] = {
    "data.truncation": RefusedValue(
        values=("left", "right", "middle"),
        reason="the agent loop would answer a question of which part is cut off",
        fix="data.filter_overlong_prompts=true leaves such prompts out; or raise max_prompt_length",
    ),
    f"{_A}actor.policy_loss.loss_mode": RefusedValue(
        values=(
            "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro",
            "cispo", "bypass_mode",
        ),
        reason="this policy loss is not there yet",
        fix="set it to vanilla",
    ),
    f"{_A}actor.optim.lr_scheduler_type": RefusedValue(
        values=("linear", "wsd"),
        reason="this schedule is not there yet",
        fix="set it to constant or cosine",
    ),
    f"{_A}rollout.name": RefusedValue(
        values=("vllm", "sglang", "trtllm", "hf"),
        reason="this engine is not there yet",
        fix="set it to transformers, which runs on any CPU",
    ),
    f"{_A}rollout.top_p": RefusedValue(
        values=ANY,
        reason="the trainer computes log-probs of the full distribution and cannot reproduce it",
        fix="set it to 1",
    ),
    f"{_A}rollout.top_k": RefusedValue(
        values=ANY,
        reason="the trainer computes log-probs of the full distribution and cannot reproduce it",
        fix="set it to -1",
    ),
    f"{_A}rollout.val_kwargs.top_p": RefusedValue(
        values=ANY,
        reason="the embedded engine samples from the full distribution",
        fix="set it to 1",
    ),
    f"{_A}rollout.val_kwargs.top_k": RefusedValue(
        values=ANY,
        reason="the embedded engine samples from the full distribution",
        fix="set it to -1",
    ),
    f"{_A}rollout.dtype": RefusedValue(
        values=("float16", "half", "auto", "fp8"),
        reason="the embedded engine computes in bfloat16 or float32",
        fix="set it to one of the two",
    ),
    f"{_A}rollout.calculate_log_probs": RefusedValue(
        values=(False,),
        reason="the engine reports log-probs anyway, and engine and trainer are compared by them",
        fix="leave it out",
    ),
    "algorithm.adv_estimator": RefusedValue(
        values=(
            "gae", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized",
            "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg",
            "optimal_token_baseline", "tir_optimal_token_baseline", "gdpo",
        ),
        reason="this advantage estimator is not there yet",
        fix="set it to grpo",
    ),
    "algorithm.use_kl_in_reward": RefusedValue(
        values=(True,),
        reason="a KL penalty needs a reference model, which is not there yet",
        fix="set it to false",
    ),
    "trainer.logger": RefusedValue(
        values=(
            "wandb", "mlflow", "swanlab", "vemlp_wandb", "clearml", "trackio", "rl_insight",
        ),
        reason="this tracker is not there yet",
        fix="choose from console, tensorboard and file",
    ),
    "trainer.device": RefusedValue(
        values=("cuda", "npu"),
        reason="training runs on the CPU so far",
        fix="set it to cpu",
    ),
    "trainer.nnodes": RefusedValue(
        values=ANY, reason="training runs on one host so far", fix="set it to 1"
    ),
    "trainer.n_gpus_per_node": RefusedValue(
        values=ANY, reason="the training worker has one rank so far", fix="set it to 1"
    ),
    "trainer.v1.trainer_mode": RefusedValue(
        values=("colocate_async", "separate_async"),
        reason="this mode is not there yet",
        fix="set it to sync",
    ),
}  # fmt: skip
