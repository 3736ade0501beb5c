"""Section `actor_rollout_ref.rollout`: generation, agent loops and weight updates of replicas."""

from typing import Any, Literal

from pydantic import Field

from rlcore.config.base import Float, Int, Section


class ValKwargsConfig(Section):
    """Sampling of validation."""

    temperature: Float = Field(default=0.0, ge=0)
    """Temperature when `do_sample`; without it the most likely token is taken."""
    top_p: Float = Field(default=1.0, ge=1, le=1)
    """Nucleus sampling; 1: off."""
    top_k: Literal[-1] = -1
    """Most likely tokens to choose from; -1: all."""
    n: Int = Field(default=1, ge=1)
    """Responses per validation prompt."""
    do_sample: bool = False
    """Sample instead of taking the most likely token."""


class AgentConfig(Section):
    """Agent loops: who talks with the engine and the tools."""

    num_workers: Int = Field(default=1, ge=1)
    """AgentLoopWorkers, each supervised by one producer (verl: 8; one keeps small hosts busy)."""
    default_agent_loop: str = "single_turn_agent"
    """Agent loop of rows that name none in `agent_name`."""


class CheckpointEngineConfig(Section):
    """How published weights reach the replicas."""

    backend: str = "naive"
    """`naive`: a file of shared memory, for replicas on the trainer's devices; `shm`: the same in
    buckets, for other processes of one host; `gloo`, `mooncake`: TCP, across hosts; or one that
    `custom_backend_module` registers."""
    update_weights_bucket_megabytes: Int = Field(default=2048, ge=1)
    """Weights travel in pieces of at most this many MiB."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Settings by backend: `{gloo: {host: 10.0.0.1}}`."""
    custom_backend_module: str | None = None
    """Python file that registers a backend of yours."""


class RolloutConfig(Section):
    """The generation side."""

    name: Literal["transformers"] = "transformers"
    """Engine (verl has no default): the embedded one, which runs on any CPU."""
    n: Int = Field(default=1, ge=1)
    """Sessions per prompt: the size of a group."""
    temperature: Float = Field(default=1.0, gt=0)
    """Temperature of sampling in training."""
    top_p: Float = Field(default=1.0, ge=1, le=1)
    """Nucleus sampling; 1: off, since the trainer works with the full distribution."""
    top_k: Literal[-1] = -1
    """Most likely tokens to choose from; -1: all."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the engine's weights."""
    max_num_seqs: Int = Field(default=64, ge=16)
    """Slots of the engine: responses that grow at the same time (verl: 256, for a GPU).

    At least 16: with fewer rows a response would depend on its neighbours in the batch.
    """
    seed: Int | None = Field(default=None, ge=0)
    """Seed of sampling; null: the run's `seed` (verl: 42), so that one key changes the run."""
    full_determinism: bool = False
    """Bitwise repeatable runs: one thread count, deterministic algorithms, fixed routing."""
    calculate_log_probs: Literal[True] = True
    """The engine reports the log-prob of every token that it samples."""
    val_kwargs: ValKwargsConfig = Field(default_factory=ValKwargsConfig)
    """Sampling of validation."""
    agent: AgentConfig = Field(default_factory=AgentConfig)
    """Agent loops."""
    checkpoint_engine: CheckpointEngineConfig = Field(default_factory=CheckpointEngineConfig)
    """Weight updates."""
    num_replicas: Int = Field(default=1, ge=1)
    """LLM servers (ours)."""
