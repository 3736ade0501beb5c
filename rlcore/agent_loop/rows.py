"""From an agent loop's output to a stored row: checked, completed, in the schema's types."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlcore.errors import DataError
from rlcore.types import AgentLoopOutput, TokenOutput

Row = dict[str, np.ndarray]


def check_output(output: object, *, max_prompt_length: int, max_response_length: int) -> None:
    """Check what an agent loop returned.

    Raises:
        DataError: it cannot be trained on; says why.
    """
    if not isinstance(output, AgentLoopOutput):
        raise DataError(
            f"an agent loop must return AgentLoopOutput or a list of them, got "
            f"{type(output).__name__}"
        )
    num_tokens = len(output.response_ids)
    if not output.prompt_ids or not num_tokens:
        raise DataError(
            f"the agent loop returned {len(output.prompt_ids)} prompt and {num_tokens} response "
            "tokens; both must be there"
        )
    lengths = {"response_mask": output.response_mask, "response_logprobs": output.response_logprobs,
               "weight_versions": output.weight_versions}  # fmt: skip
    for name, values in lengths.items():
        if values is not None and len(values) != num_tokens:
            raise DataError(
                f"the agent loop returned {num_tokens} response tokens and {len(values)} {name}"
            )
    if not set(output.response_mask) <= {0, 1}:
        raise DataError(f"response_mask must be 0 or 1, has {sorted(set(output.response_mask))}")
    for name, length, limit in (
        ("prompt", len(output.prompt_ids), max_prompt_length),
        ("response", num_tokens, max_response_length),
    ):
        if length > limit:
            raise DataError(
                f"the agent loop returned a {name} of {length} tokens, more than "
                f"data.max_{name}_length={limit}; agent loops cut what is too long themselves"
            )


def complete_output(output: AgentLoopOutput, turns: Sequence[TokenOutput]) -> None:
    """Fill in log-probs and weight versions that the loop left out, from the session's turns.

    verl's loops know no weight versions. Where the sampled tokens are not those of the turns in
    their order, every token gets the oldest version of the session: staleness is never
    underestimated. Tool tokens get log-prob 0 and version -1.

    Raises:
        DataError: log-probs are missing and cannot be told from the turns.
    """
    sampled = [
        token for token, m in zip(output.response_ids, output.response_mask, strict=True) if m
    ]
    tokens = [token for turn in turns for token in turn.token_ids]
    is_same = tokens[: len(sampled)] == sampled
    if output.response_logprobs is None:
        if not is_same:
            raise DataError(
                "the agent loop returned no response_logprobs, and its sampled tokens are not "
                "those of its turns in their order; pass on TokenOutput.log_probs (0.0 for tool "
                "tokens)"
            )
        values = iter([value for turn in turns for value in turn.log_probs])
        output.response_logprobs = [next(values) if m else 0.0 for m in output.response_mask]
    if output.weight_versions is None:
        versions = [version for turn in turns for version in turn.weight_versions]
        if not is_same:
            versions = [min(versions, default=-1)] * len(sampled)
        source = iter(versions)
        output.weight_versions = [next(source) if m else -1 for m in output.response_mask]


def make_row(output: AgentLoopOutput, score: float) -> Row:
    """Return the columns of a complete output; the score lies on the last sampled token."""
    mask = np.asarray(output.response_mask, dtype=np.int64)
    scores = np.zeros(len(mask), dtype=np.float32)
    sampled = np.flatnonzero(mask)
    scores[sampled[-1] if len(sampled) else -1] = score
    return {
        "prompts": np.asarray(output.prompt_ids, dtype=np.int64),
        "responses": np.asarray(output.response_ids, dtype=np.int64),
        "response_mask": mask,
        "rollout_log_probs": np.asarray(output.response_logprobs, dtype=np.float32),
        "weight_versions": np.asarray(output.weight_versions, dtype=np.int64),
        "rm_scores": scores,
    }


def make_tag(row: Row, global_step: int) -> dict[str, Any]:
    """Return the row's tag: lengths, dispatch step and span of weight versions (verl's names)."""
    versions = row["weight_versions"][row["response_mask"] == 1]
    return {
        "prompt_len": len(row["prompts"]),
        "response_len": len(row["responses"]),
        "seq_len": len(row["prompts"]) + len(row["responses"]),
        "global_steps": global_step,
        "min_global_steps": int(versions.min()) if len(versions) else -1,
        "max_global_steps": int(versions.max()) if len(versions) else -1,
    }
