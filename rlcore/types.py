"""The nouns that cross process borders: small, frozen, without torch.

Vocabulary (no synonyms): prompt, response, session (one of the n attempts at a prompt), trajectory
(one stored row), group (all sessions of one prompt), step, inner step, optimizer step,
weight_version (names a published trainer state), replica (one LLM server), run and attempt.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

PromptStatus = Literal[
    "pending", "running", "finished", "failure", "sampled", "trained",
    "stale", "filtered", "failed", "discarded",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class CallKey:
    """Who calls: carried by every call to a collaborator, so that older callers can be refused."""

    run_id: str
    attempt: int
    """Number of the Prefect flow run of this training run, from 1: the fencing token."""
    global_step: int
    inner_step: int = 0
    phase: str = ""
    try_number: int = 1
    """Try of this phase, from 1; a lower one than seen for the same phase is refused."""

    def __str__(self) -> str:
        return (
            f"run {self.run_id} attempt {self.attempt} step {self.global_step}.{self.inner_step} "
            f"phase {self.phase or '-'} try {self.try_number}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRef:
    """What travels between phases instead of tensors: names a leased batch."""

    run_id: str
    global_step: int
    inner_step: int
    lease_id: str
    num_prompts: int
    num_trajectories: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSpec:
    """One prompt as it is fed to the ledger and claimed by an AgentLoopWorker."""

    uid: str
    """Derived from (run, partition, epoch, index); holds no underscore."""
    partition_id: str
    """`{run_id}/train` or `{run_id}/val`."""
    global_step: int
    """Dispatch step."""
    epoch: int
    index: int
    """Row of the data file."""
    raw_prompt: list[dict[str, Any]]
    """Chat messages."""
    num_sessions: int
    """Attempts at this prompt (rollout.n, or val_kwargs.n)."""
    validate: bool = False
    repeat: int = 0
    """How often its epoch had the row before; 0 unless a sampler or a weight repeats rows."""
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    """The row's other columns: data_source, reward_model, extra_info, agent_name, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRecord:
    """How one session of a prompt ended. A failed session has an error, never a reward."""

    session_id: int
    keys: list[str]
    """Row keys `{uid}_{session_id}_{index}` in the queue; empty when the session failed."""
    tags: list[dict[str, Any]]
    """Per row: prompt_len, response_len, seq_len, min_global_steps, max_global_steps."""
    reward: float | None = None
    reward_extra: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the reward function returned beside the score, e.g. acc; what it will be told of the
    session while that `is_unscored`."""
    is_unscored: bool = False
    """Its reward comes when the batch is complete: the reward model shares the training devices."""
    num_turns: int = 0
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    error_type: str = ""
    error_message: str = ""
    """With the row's file and index and the last lines of the traceback."""

    @property
    def is_failed(self) -> bool:
        """Whether the session ended with an error."""
        return bool(self.error_type)


BASELINE_TAG = "baseline"
"""Tag of every row of a group for which a greedy response was scored: that score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledBatch:
    """The prompts leased to (global_step, inner_step); asking again returns the same."""

    lease_id: str
    global_step: int
    inner_step: int
    uids: list[str]
    keys: list[str]
    """Row keys of all trajectories, grouped by prompt, in the order of `uids`."""
    tags: list[dict[str, Any]]
    """One per key; holds uid, session_id, reward, reward_extra besides the row's tag."""
    metrics: dict[str, float]


@dataclass(kw_only=True, slots=True)
class TokenOutput:
    """What a replica returns for one request (verl's name)."""

    token_ids: list[int]
    log_probs: list[float]
    """Of the temperature-scaled full distribution, nats; one per token."""
    weight_versions: list[int]
    """The weight version that sampled each token."""
    stop_reason: str
    """`completed` (EOS or stop token, which is in token_ids), `length` or `aborted`."""
    extra_fields: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(kw_only=True, slots=True)
class AgentLoopOutput:
    """One trajectory as an agent loop returns it (verl's fields)."""

    prompt_ids: list[int]
    response_ids: list[int]
    """Everything after the prompt, tool tokens included."""
    response_mask: list[int]
    """1 where the policy sampled the token, 0 for tool tokens."""
    response_logprobs: list[float] | None = None
    weight_versions: list[int] | None = None
    """Per response token; -1 where the token was not sampled."""
    reward_score: float | None = None
    """Set when the loop scored itself; the reward function is not called then."""
    num_turns: int = 2
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    extra_fields: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightMeta:
    """A published set of weights: where it lies and how to check it."""

    version: int
    path: str
    """The shared segment or file that holds the tensors."""
    num_bytes: int
    checksum: str
    tensors: list[dict[str, Any]]
    """Per tensor: name, dtype, shape, offset, num_bytes."""
    transport: dict[str, Any] = field(default_factory=dict[str, Any])
    """How a replica gets the bytes: `backend` and what that needs, e.g. addresses; empty: it reads
    `path`."""
    adapter_scale: float | None = None
    """Set: the tensors are LoRA's alone, `….lora_A.weight` and `….lora_B.weight`; their product,
    scaled so, is added to the weights of the model folder."""
