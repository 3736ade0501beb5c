"""Section `actor_rollout_ref.rollout`: generation, agent loops and weight updates of replicas."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from rlcore.config.base import (
    Characters,
    Count,
    Devices,
    Factor,
    Hosts,
    LogProb,
    Megabytes,
    PathText,
    Processes,
    Seconds,
    Section,
    Seed,
    Sessions,
    Share,
    Slots,
    Tokens,
)
from rlcore.config.pending import FREE_CACHE, LOAD_FORMAT, PIPELINE, ROLLOUT_POOL


def _all_or_some(value: int) -> int:
    if value == 0 or value < -1:
        raise ValueError("it must be -1 (all) or at least 1")
    return value


TopK = Annotated[Count, AfterValidator(_all_or_some)]


class ValKwargsConfig(Section):
    """Sampling of validation."""

    temperature: Factor = Field(default=0.0, ge=0)
    """Temperature when `do_sample`; without it the most likely token is taken."""
    top_p: Share = Field(default=1.0, gt=0, le=1)
    """Sample from the fewest most likely tokens that hold this share; 1: off."""
    top_k: TopK = -1
    """Most likely tokens to choose from; -1: all."""
    n: Sessions = Field(default=1, ge=1)
    """Responses per validation prompt."""
    do_sample: bool = False
    """Sample instead of taking the most likely token."""


class AgentConfig(Section):
    """Agent loops: who talks with the engine and the tools."""

    num_workers: Processes = Field(default=1, ge=1)
    """AgentLoopWorkers, each supervised by one producer (verl: 8; one keeps small hosts busy)."""
    default_agent_loop: str = "single_turn_agent"
    """Agent loop of rows that name none in `agent_name`."""
    agent_loop_config_path: PathText | None = None
    """YAML list of agent loops: name, _target_ and constructor arguments."""
    endpoint_host: str = Field(default="127.0.0.1", min_length=1)
    """Address of a worker's host on which the OpenAI-compatible endpoint of its agents listens;
    whoever reaches it needs the worker's token (ours)."""


class MultiTurnConfig(Section):
    """The built-in `tool_agent`."""

    max_assistant_turns: Count | None = Field(default=None, ge=1)
    """Turns of the model at most; null: as many as fit the response."""
    max_user_turns: Count | None = Field(default=None, ge=1)
    """Rounds of tool answers at most; null: as many as fit the response."""
    max_parallel_calls: Count = Field(default=1, ge=1)
    """Tool calls of one turn that are run, at the same time; further ones are left out."""
    max_invalid_calls: Count | None = Field(default=None, ge=1)
    """Calls that failed or could not be run after which the session ends; null: no limit (ours)."""
    max_tool_response_length: Characters = Field(default=256, ge=1)
    """Characters of a tool's answer at most."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Which part of a longer answer is kept; `middle` keeps both ends."""
    tool_timeout: Seconds = Field(default=30.0, gt=0)
    """Seconds for one call of a tool (ours; verl: no limit)."""
    num_tool_workers: Processes = Field(default=2, ge=1)
    """Processes of each agent loop worker that run sync tools (ours)."""
    function_tool_path: PathText | None = None
    """Python file, or installed module, with functions marked `@function_tool`."""
    format: Literal["hermes", "qwen3_coder"] = "hermes"
    """How the model writes tool calls."""


class CheckpointEngineConfig(Section):
    """How published weights reach the replicas."""

    backend: str = "naive"
    """`naive`: a file of shared memory, for replicas on the trainer's devices; `shm`: the same in
    buckets, for other processes of one host; `gloo`, `mooncake`: TCP, across hosts; `nccl`: from
    GPU to GPU; `kimi_ckpt_engine`: checkpoint-engine, on the replicas' GPUs; or one that
    `custom_backend_module` registers."""
    update_weights_bucket_megabytes: Megabytes = Field(default=2048, ge=1)
    """Weights travel in pieces of at most this size."""
    engine_kwargs: dict[str, dict[str, Any]] = Field(default_factory=dict[str, dict[str, Any]])
    """Settings by backend: `{gloo: {host: 10.0.0.1}}`."""
    custom_backend_module: PathText | None = None
    """Python file that registers a backend of yours."""


class LogProbsAlarmConfig(Section):
    """How far engine and trainer may be apart in the log-probs of what was just sampled (ours)."""

    mean: LogProb | None = Field(default=None, gt=0)
    """Mean over the tokens of a step; null: 1e-5 (vllm: 2e-5) where both compute in float32 in sync
    mode, no limit elsewhere (ours)."""
    max: LogProb | None = Field(default=None, gt=0)
    """Largest of a step; null: 1e-3 there (ours)."""


class RolloutConfig(Section):
    """The generation side."""

    name: str = "transformers"
    """Engine (verl has no default): the embedded one, which runs on any CPU; or another by name."""
    n: Sessions = Field(default=1, ge=1)
    """Sessions per prompt: the size of a group."""
    temperature: Factor = Field(default=1.0, gt=0)
    """Temperature of sampling in training."""
    top_p: Share = Field(default=1.0, ge=1, le=1)
    """Nucleus sampling; 1: off, since the trainer works with the full distribution."""
    top_k: Literal[-1] = -1
    """Most likely tokens to choose from; -1: all."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the engine's weights."""
    max_num_seqs: Slots = Field(default=64, ge=16)
    """Slots of the engine: responses that grow at the same time (verl: 256, for a GPU).

    At least 16: with fewer rows a response would depend on its neighbours in the batch.
    """
    seed: Seed | None = Field(default=None, ge=0)
    """Seed of sampling; null: the run's `seed` (verl: 42), so that one key changes the run."""
    full_determinism: bool = False
    """Bitwise repeatable runs: one thread count, deterministic algorithms, fixed routing."""
    calculate_log_probs: Literal[True] = True
    """The engine reports the log-prob of every token that it samples."""
    log_probs_alarm: LogProbsAlarmConfig = Field(default_factory=LogProbsAlarmConfig)
    """When engine and trainer count as apart."""
    val_kwargs: ValKwargsConfig = Field(default_factory=ValKwargsConfig)
    """Sampling of validation."""
    agent: AgentConfig = Field(default_factory=AgentConfig)
    """Agent loops."""
    multi_turn: MultiTurnConfig = Field(default_factory=MultiTurnConfig)
    """The built-in `tool_agent`."""
    checkpoint_engine: CheckpointEngineConfig = Field(default_factory=CheckpointEngineConfig)
    """Weight updates."""
    num_replicas: Processes = Field(default=1, ge=1)
    """LLM servers (ours)."""
    nnodes: Annotated[Hosts, ROLLOUT_POOL] = Field(default=0, ge=0)
    """Hosts of replicas with devices of their own, for `separate_async`; 0: none."""
    n_gpus_per_node: Annotated[Devices, ROLLOUT_POOL] = Field(default=0, ge=0)
    """Devices of such a host (verl: the trainer's)."""
    tensor_model_parallel_size: Processes = Field(default=1, ge=1)
    """Devices (on a CPU: processes) that share one replica's weights (verl: 2)."""
    data_parallel_size: Processes = Field(default=1, ge=1)
    """Data-parallel engines inside one replica."""
    expert_parallel_size: Processes = Field(default=1, ge=1)
    """Devices that share the experts; 1, or tensor x data."""
    pipeline_model_parallel_size: Annotated[Literal[1], PIPELINE] = 1
    """Pipeline stages; verl has none either."""
    gpu_memory_utilization: Share = Field(default=0.5, gt=0, le=1)
    """Share of a GPU's memory that the engine takes."""
    max_num_batched_tokens: Tokens = Field(default=8192, ge=1)
    """Tokens of one engine step at most."""
    max_model_len: Tokens | None = Field(default=None, ge=1)
    """Tokens of a prompt and its response at most; null: the sum of the two."""
    enforce_eager: bool = False
    """No CUDA graphs; on a CPU nothing is compiled either way."""
    free_cache_engine: Annotated[bool, FREE_CACHE] = True
    """Free the KV cache while the policy trains."""
    sleep_level: Literal[1, 2] = 1
    """What an engine on a GPU frees besides its cache: 1 moves the weights to the host's memory, 2
    drops them (ours)."""
    enable_chunked_prefill: bool = True
    """Prefill in pieces beside decoding."""
    enable_prefix_caching: bool = True
    """Keep the KV cache of common prefixes."""
    load_format: Annotated[str, LOAD_FORMAT] = "dummy"
    """How the engine loads weights at its start."""
