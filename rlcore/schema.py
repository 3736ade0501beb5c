"""The columns of a stored row: the closed list of what may be in the queue.

Legend: S prompt tokens, T response tokens of one trajectory. The adapter refuses other columns.
Wire names are verl's (`ref_log_prob` is singular there).
"""

from dataclasses import dataclass
from typing import Literal

from rlcore.errors import DataError

Length = Literal["S", "T"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column: its type, length and who writes it."""

    name: str
    dtype: Literal["int64", "float32"]
    length: Length
    producer: str
    description: str


_ROWS: list[tuple[str, Literal["int64", "float32"], Length, str, str]] = [
    # name, dtype, length, producer, description
    ("prompts", "int64", "S", "agent loop worker",
     "prompt token ids"),
    ("responses", "int64", "T", "agent loop worker",
     "response token ids, tool tokens included"),
    ("response_mask", "int64", "T", "agent loop worker",
     "1 where the policy sampled the token"),
    ("rollout_log_probs", "float32", "T", "agent loop worker",
     "log-probs from the engine at sampling, nats"),
    ("weight_versions", "int64", "T", "agent loop worker",
     "weight version that sampled the token, -1 for tool tokens"),
    ("rm_scores", "float32", "T", "agent loop worker",
     "the reward at the last sampled token, else 0"),
    ("old_log_probs", "float32", "T", "compute_old_log_probs",
     "log-probs under the weights at the start of the step"),
    ("entropy", "float32", "T", "compute_old_log_probs",
     "entropy of the token distribution, nats"),
    ("ref_log_prob", "float32", "T", "compute_ref_log_probs",
     "log-probs under the frozen reference"),
    ("teacher_logprobs", "float32", "T", "compute_teacher_log_probs",
     "log-probs under the teacher"),
    ("values", "float32", "T", "compute_values",
     "the critic's value of the state before the token"),
    ("advantages", "float32", "T", "compute_advantage",
     "0 where response_mask is 0"),
    ("returns", "float32", "T", "compute_advantage",
     "0 where response_mask is 0"),
    ("rollout_is_weights", "float32", "T", "compute_advantage",
     "importance weights of rollout correction, 0 where train_mask is 0"),
    ("train_mask", "int64", "T", "compute_advantage",
     "response_mask without what rollout correction rejected"),
]  # fmt: skip

COLUMNS: dict[str, Column] = {
    name: Column(name=name, dtype=dtype, length=length, producer=producer, description=text)
    for name, dtype, length, producer, text in _ROWS
}

ROLLOUT_COLUMNS = [c.name for c in COLUMNS.values() if c.producer == "agent loop worker"]


def column(name: str) -> Column:
    """Return the column called `name`.

    Raises:
        DataError: there is none; the message lists the known ones.
    """
    try:
        return COLUMNS[name]
    except KeyError:
        raise DataError(f"unknown column {name!r}; known: {', '.join(COLUMNS)}") from None
