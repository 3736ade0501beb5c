"""What a run takes in memory, part by part: sums of sizes, and an estimate of activations.

Exact: weights, gradients, AdamW's moments, the engine's copy, its KV cache, the shared file of
published weights, two snapshots, logits. Estimated: activations of one micro-batch (34 bytes per
token, layer and hidden unit under bf16 autocast without recompute, after Korthikanti et al.,
https://arxiv.org/abs/2205.05198, attention scores not kept; twice that in float32). Not counted:
a reward model and its keys and values, and the processes themselves (about 0.4 GB each with torch
loaded).
"""

from rlcore.config.model_shape import ModelShape
from rlcore.config.run import RunConfig

_ACTIVATION_BYTES = {"bfloat16": 34, "float32": 68}
_BYTES = {"bfloat16": 2, "float32": 4}
_FLOAT32 = 4
NUM_SNAPSHOTS = 2
"""The newer is written beside the older, whose room is kept for the one after."""


def memory_parts(
    config: RunConfig, shape: ModelShape, teacher: ModelShape | None = None
) -> dict[str, int]:
    """Return bytes by part; training parts are those of one rank.

    Adapters are counted as nothing, a critic as the policy's size with one value per token, and so
    is a teacher whose shape is not known.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    parameters, tokens = shape.num_parameters, micro_batch_tokens(config)
    kv_of_token = (
        2 * shape.num_layers * shape.num_kv_heads * shape.head_size * _BYTES[rollout.dtype]
    )
    own = -(-parameters // config.num_ranks)
    trained = 0 if config.actor_rollout_ref.model.lora_rank else own
    responses = min(tokens, micro_batch_rows(config) * config.data.max_response_length)
    return {
        "weights": _FLOAT32 * own,
        "gradients": _FLOAT32 * trained,
        "adamw_moments": 2 * _FLOAT32 * trained,
        **_other_models(config, own, teacher),
        "activations_estimate": (
            tokens * shape.num_layers * shape.hidden_size * _ACTIVATION_BYTES[actor.dtype]
        ),
        "logits_and_their_gradient": 2 * responses * shape.vocab_size * _FLOAT32,
        "engine_weights": rollout.num_replicas * _BYTES[rollout.dtype] * parameters,
        "engine_kv_cache": (
            rollout.num_replicas * rollout.max_num_seqs * config.max_model_len * kv_of_token
        ),
        "published_weights": _BYTES[rollout.dtype] * parameters,
        **_snapshots(config, parameters),
    }


def _snapshots(config: RunConfig, parameters: int) -> dict[str, int]:
    """Return bytes in shared memory: the last snapshot, and the one that is written."""
    if not config.trainer.snapshots:
        return {}
    trained = 0 if config.actor_rollout_ref.model.lora_rank else parameters
    trained += parameters if config.needs_critic else 0
    return {"snapshots": NUM_SNAPSHOTS * 3 * _FLOAT32 * trained}


def _other_models(config: RunConfig, own: int, teacher: ModelShape | None) -> dict[str, int]:
    """Return bytes of what the run has beside the policy, which has `own` weights on a rank."""
    model, parts = config.actor_rollout_ref, dict[str, int]()
    is_below_adapters = model.model.lora_rank and model.ref.model.path is None
    if config.needs_reference and not is_below_adapters:
        parts["reference_weights"] = _FLOAT32 * own
    if config.teacher_path is not None:
        of_teacher = own if teacher is None else -(-teacher.num_parameters // config.num_ranks)
        parts["teacher_weights"] = _FLOAT32 * of_teacher
    if config.needs_critic:
        parts["critic_weights_gradients_moments"] = 4 * _FLOAT32 * own
    return parts


def micro_batch_rows(config: RunConfig) -> int:
    """Return the trajectories of one forward and backward pass at most."""
    actor = config.actor_rollout_ref.actor
    rows = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n // config.num_ranks
    if actor.use_dynamic_bsz or actor.ppo_micro_batch_size_per_gpu is None:
        return rows
    return min(rows, actor.ppo_micro_batch_size_per_gpu)


def micro_batch_tokens(config: RunConfig) -> int:
    """Return the tokens of one forward and backward pass at most."""
    actor = config.actor_rollout_ref.actor
    tokens = micro_batch_rows(config) * config.max_model_len
    return min(tokens, actor.ppo_max_token_len_per_gpu) if actor.use_dynamic_bsz else tokens
