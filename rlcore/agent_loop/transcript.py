"""The tokens of a session of several turns, in the columns of a trajectory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcore.config.rollout import MultiTurnConfig
from rlcore.types import AgentLoopOutput, TokenOutput


@dataclass(kw_only=True, slots=True)
class Transcript:
    """What a session has so far; grows by what is new, so that late turns cost no more."""

    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list[int])
    """Everything after the prompt."""
    mask: list[int] = field(default_factory=list[int])
    """1 where the policy sampled the token."""
    log_probs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    assistant_turns: int = 0
    user_turns: int = 0
    """Rounds of answers to the model."""
    generate_s: float = 0.0
    answer_s: float = 0.0
    """Seconds that tools or the environment took."""
    stop: str = ""
    """Why it ended."""

    def add_sampled(self, output: TokenOutput, *, is_trained: bool = True) -> None:
        """Append a turn of the model; one that is trained elsewhere is context here."""
        if is_trained:
            self.ids += output.token_ids
            self.mask += [1] * len(output.token_ids)
            self.log_probs += output.log_probs
            self.versions += output.weight_versions
        else:
            self._add_given(output.token_ids)
        self.assistant_turns += 1

    def add_context(self, ids: Sequence[int]) -> None:
        """Append what the model is told."""
        self._add_given(ids)
        self.user_turns += 1

    def _add_given(self, ids: Sequence[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def output(
        self, metrics: Mapping[str, float], extra_fields: Mapping[str, Any]
    ) -> AgentLoopOutput:
        """Return the trajectory."""
        return AgentLoopOutput(
            prompt_ids=self.prompt_ids,
            response_ids=self.ids,
            response_mask=self.mask,
            response_logprobs=self.log_probs,
            weight_versions=self.versions,
            num_turns=self.user_turns + self.assistant_turns + 1,
            metrics={
                "generate_sequences": self.generate_s,
                "tool_calls": self.answer_s,
                **metrics,
            },
            extra_fields={"stop_reason": self.stop, **extra_fields},
        )


def why_stop(
    transcript: Transcript, output: TokenOutput, settings: MultiTurnConfig, max_tokens: int
) -> str:
    """Return why a session ends after the turn that was just added; empty: it may go on.

    Args:
        transcript: Of the session.
        output: The turn.
        settings: Limits of turns.
        max_tokens: Of the response.
    """
    if len(transcript.ids) >= max_tokens or output.stop_reason != "completed":
        return "length"
    for name, count, limit in (
        ("max_assistant_turns", transcript.assistant_turns, settings.max_assistant_turns),
        ("max_user_turns", transcript.user_turns, settings.max_user_turns),
    ):
        if limit is not None and count >= limit:
            return name
    return ""
