"""Section `reward`: scores of responses."""

from typing import Annotated, Any, Literal

from pydantic import Field

from rlcore.config.base import (
    Count,
    Devices,
    Factor,
    Hosts,
    Megabytes,
    PathText,
    Processes,
    Seconds,
    Section,
    Share,
    Slots,
    Tokens,
)
from rlcore.config.pending import REWARD_MANAGER_MODULE, REWARD_POOL


class CustomRewardFunctionConfig(Section):
    """A reward function of the user's."""

    path: PathText | None = None
    """Python file; null: the rule registered for the row's data source."""
    name: str = "compute_score"
    """Function in that file, sync or async."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Passed on to the function."""


class NamedRewardConfig(Section):
    """One of several rewards that are added up (ours)."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """Name of the part in metrics and rows."""
    weight: Factor = 1.0
    """Factor of its score in the sum."""
    path: PathText | None = None
    """Python file; null: the rule registered for the row's data source."""
    function: str = "compute_score"
    """Function in that file, sync or async."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Passed on to the function."""


class RewardManagerModuleConfig(Section):
    """A reward manager of the user's."""

    path: PathText | None = None
    """Python file."""
    name: str = "custom_reward_manager"
    """Class in that file."""


class RewardManagerConfig(Section):
    """What stands round the reward function."""

    source: Annotated[Literal["register", "importlib"], REWARD_MANAGER_MODULE] = "register"
    """Where the manager comes from: a registered name, or a module."""
    name: str = "naive"
    """`naive`; `dapo`: a penalty for overlong responses; `rate_limited` (`limited`): for judges."""
    module: Annotated[RewardManagerModuleConfig, REWARD_MANAGER_MODULE] = Field(
        default_factory=RewardManagerModuleConfig
    )
    """A reward manager of the user's."""


class OverlongBufferConfig(Section):
    """DAPO's soft punishment of overlong responses."""

    enable: bool = False
    """Punish responses that reach into the last `len` tokens of `max_resp_len`."""
    len: Tokens = Field(default=0, ge=0)
    """Tokens over which the penalty grows from 0 to `penalty_factor`."""
    penalty_factor: Factor = Field(default=0.0, ge=0)
    """Penalty at `max_resp_len`."""
    log: bool = False
    """Keep `overlong_reward` and `overlong` beside the score."""


class RewardKwargsConfig(Section):
    """Settings of the reward manager `dapo`."""

    overlong_buffer_cfg: OverlongBufferConfig = Field(default_factory=OverlongBufferConfig)
    """The soft punishment."""
    max_resp_len: Tokens | None = Field(default=None, ge=1)
    """Length at which the penalty is full; null: data.max_response_length."""


class RewardRolloutConfig(Section):
    """The LLM servers of a reward model."""

    name: Literal["transformers"] = "transformers"
    """Engine (verl: the policy's)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of the weights."""
    prompt_length: Tokens = Field(default=2048, ge=1)
    """Tokens of what is asked at most."""
    response_length: Tokens = Field(default=2048, ge=1)
    """Tokens of a judge's answer at most."""
    max_num_seqs: Slots = Field(default=16, ge=16)
    """Answers of a judge that grow at the same time (verl: 1024, for a GPU)."""
    num_replicas: Processes = Field(default=1, ge=1)
    """LLM servers (ours)."""


class RewardModelConfig(Section):
    """A reward model or judge on LLM servers of its own.

    Without a reward function of yours the model itself scores, by its classification head. With one
    it is a judge: the function may take `reward_router_address` and `reward_model_tokenizer`.
    """

    enable: bool = False
    """Score by a model."""
    enable_resource_pool: bool = False
    """Devices of its own, so that responses are scored while others grow.

    Without them a batch is scored when it is complete, and a response that cannot be scored ends
    the phase instead of failing its session.
    """
    nnodes: Annotated[Hosts, REWARD_POOL] = Field(default=0, ge=0)
    """Hosts of that pool."""
    n_gpus_per_node: Annotated[Devices, REWARD_POOL] = Field(default=8, ge=0)
    """Devices of such a host."""
    model_path: PathText | None = None
    """Folder in Hugging Face format."""
    rollout: RewardRolloutConfig = Field(default_factory=RewardRolloutConfig)
    """Its LLM servers."""


class RewardConfig(Section):
    """Scores of responses."""

    custom_reward_function: CustomRewardFunctionConfig = Field(
        default_factory=CustomRewardFunctionConfig
    )
    """A reward function of the user's."""
    functions: tuple[NamedRewardConfig, ...] = ()
    """Several named rewards; the score is the weighted sum (ours)."""
    reward_manager: RewardManagerConfig = Field(default_factory=RewardManagerConfig)
    """What stands round the reward function."""
    reward_kwargs: RewardKwargsConfig = Field(default_factory=RewardKwargsConfig)
    """Settings of the reward manager `dapo`."""
    reward_model: RewardModelConfig = Field(default_factory=RewardModelConfig)
    """A reward model or judge."""
    num_workers: Processes = Field(default=2, ge=1)
    """Processes that score, shared out over the agent loop workers (verl: 8)."""
    timeout: Seconds = Field(default=60.0, gt=0)
    """Seconds for one response; a process that takes longer is killed (ours; verl: no limit)."""
    max_memory_mb: Megabytes = Field(default=4096, ge=64)
    """Memory that a scoring process may add to that of its start (ours; verl: no limit)."""
    max_concurrent: Count = Field(default=1, ge=1)
    """`rate_limited`: responses that are scored at a time, by as many processes."""
    max_rpm: Count | None = Field(default=None, ge=1)
    """`rate_limited`: responses per minute; null: no limit."""
    max_tpm: Tokens | None = Field(default=None, ge=1)
    """`rate_limited`: tokens per minute; null: no limit."""
    estimated_tokens_per_request: Tokens = Field(default=2000, ge=1)
    """`rate_limited`: tokens that a response counts towards `max_tpm`."""
    max_failure_ratio: Share = Field(default=0.5, ge=0, le=1)
    """A larger share of failed sessions than this ends the run (ours)."""
