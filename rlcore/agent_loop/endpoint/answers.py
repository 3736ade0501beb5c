"""The JSON of answers, whole and in chunks, as OpenAI's clients read it."""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerFast

from rlcore.agent_loop.endpoint.requests import Options
from rlcore.json_http import usage
from rlcore.tools.calls import ToolCall
from rlcore.types import TokenOutput

REPLACEMENT = "\ufffd"
"""Stands for bytes that are no whole character."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a finished response says."""

    text: str
    finish_reason: str
    tool_calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


def tool_calls_json(calls: Sequence[ToolCall], first: int) -> list[dict[str, Any]]:
    """Return calls with ids.

    Args:
        calls: Of one response.
        first: Number of the first one in its session. The ids follow from it: some templates show
            them to the model, and a repeated run must read the same.
    """
    return [
        {
            "id": f"call{first + number:05d}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for number, call in enumerate(calls)
    ]


class AnswerForm(ABC):
    """Answers one request in its API's form."""

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(
        self, options: Options, tokenizer: PreTrainedTokenizerFast, prompt_ids: Sequence[int]
    ) -> None:
        """Begin an answer.

        Args:
            options: What the request wants to know.
            tokenizer: The policy's.
            prompt_ids: All that the model reads.
        """
        self._options = options
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._num_characters = 0

    def whole(self, answer: Answer, output: TokenOutput) -> dict[str, Any]:
        """Return the answer in one piece."""
        choice = self._choice(self._whole_body(answer), output, answer.finish_reason)
        return {
            **self._head(self.kind),
            **self._prompt_json(),
            "choices": [choice],
            "usage": usage(len(self._prompt_ids), len(output.token_ids)),
        }

    def start(self) -> dict[str, Any]:
        """Return the first chunk."""
        body = self._start_body()
        return {**self._chunk(body, _nothing(), None), **self._prompt_json()}

    def delta(self, text: str, part: TokenOutput) -> list[dict[str, Any]]:
        """Return a chunk of text, with the tokens that were sampled since the last one.

        None where there is no text, and the request wants to know nothing of tokens.
        """
        has_tokens = self._options.has_logprobs or self._options.return_token_ids
        if text or (has_tokens and part.token_ids):
            return [self._chunk(self._delta_body(text), part, None)]
        return []

    def end(self, answer: Answer, text: str, part: TokenOutput) -> list[dict[str, Any]]:
        """Return the last chunks.

        Args:
            answer: The whole.
            text: What of it was not sent yet.
            part: Tokens that were not sent yet.
        """
        chunks = self.delta(text, part)
        chunks += [self._chunk(body, _nothing(), None) for body in self._call_bodies(answer)]
        chunks.append(self._chunk(self._end_body(), _nothing(), answer.finish_reason))
        return chunks

    def usage_chunk(self, output: TokenOutput) -> dict[str, Any]:
        """Return the chunk that counts tokens."""
        counted = usage(len(self._prompt_ids), len(output.token_ids))
        return {**self._head(self.chunk_kind), "choices": [], "usage": counted}

    def _chunk(
        self, body: dict[str, Any], part: TokenOutput, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = self._choice(body, part, finish_reason)
        return {**self._head(self.chunk_kind), "choices": [choice]}

    def _head(self, kind: str) -> dict[str, Any]:
        model = self._options.model
        return {"id": self._id, "object": kind, "created": self._created, "model": model}

    def _choice(
        self, body: dict[str, Any], part: TokenOutput, finish_reason: str | None
    ) -> dict[str, Any]:
        has_logprobs = self._options.has_logprobs and part.token_ids
        choice = {
            "index": 0,
            **body,
            "logprobs": self._logprobs(part) if has_logprobs else None,
            "finish_reason": finish_reason,
        }
        if self._options.return_token_ids:
            choice["token_ids"] = part.token_ids
        return choice

    def _prompt_json(self) -> dict[str, Any]:
        if not self._options.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self._prompt_ids)}

    def _texts(self, part: TokenOutput) -> list[str]:
        """Return the text of each token by itself."""
        return [str(self._tokenizer.decode([token])) for token in part.token_ids]

    @abstractmethod
    def _whole_body(self, answer: Answer) -> dict[str, Any]: ...

    @abstractmethod
    def _start_body(self) -> dict[str, Any]: ...

    @abstractmethod
    def _delta_body(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _call_bodies(self, answer: Answer) -> list[dict[str, Any]]: ...

    @abstractmethod
    def _end_body(self) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, part: TokenOutput) -> dict[str, Any]: ...


class ChatAnswer(AnswerForm):
    """The next message of a conversation."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def _whole_body(self, answer: Answer) -> dict[str, Any]:
        content = None if answer.tool_calls and not answer.text else answer.text
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if answer.tool_calls:
            message["tool_calls"] = answer.tool_calls
        return {"message": message}

    def _start_body(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}}

    def _delta_body(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}}

    def _call_bodies(self, answer: Answer) -> list[dict[str, Any]]:
        calls = enumerate(answer.tool_calls)
        return [{"delta": {"tool_calls": [{"index": i, **call}]}} for i, call in calls]

    def _end_body(self) -> dict[str, Any]:
        return {"delta": {}}

    def _logprobs(self, part: TokenOutput) -> dict[str, Any]:
        content = [
            {
                "token": text,
                "logprob": log_prob,
                "bytes": None if REPLACEMENT in text else list(text.encode()),
                "top_logprobs": [],
            }
            for text, log_prob in zip(self._texts(part), part.log_probs, strict=True)
        ]
        return {"content": content, "refusal": None}


class CompletionAnswer(AnswerForm):
    """How a text goes on."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    prefix = "cmpl"

    def _whole_body(self, answer: Answer) -> dict[str, Any]:
        return {"text": answer.text}

    def _start_body(self) -> dict[str, Any]:
        return {"text": ""}

    def _delta_body(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _call_bodies(self, answer: Answer) -> list[dict[str, Any]]:
        del answer
        return []

    def _end_body(self) -> dict[str, Any]:
        return {"text": ""}

    def _logprobs(self, part: TokenOutput) -> dict[str, Any]:
        texts = self._texts(part)
        offsets: list[int] = []
        for text in texts:
            offsets.append(self._num_characters)
            self._num_characters += len(text)
        return {
            "tokens": texts,
            "token_logprobs": part.log_probs,
            "top_logprobs": None,
            "text_offset": offsets,
        }


def part_from(output: TokenOutput, start: int) -> TokenOutput:
    """Return the tokens of an output from position `start` on."""
    return TokenOutput(
        token_ids=output.token_ids[start:],
        log_probs=output.log_probs[start:],
        weight_versions=output.weight_versions[start:],
        stop_reason=output.stop_reason,
    )


def _nothing() -> TokenOutput:
    return TokenOutput(token_ids=[], log_probs=[], weight_versions=[], stop_reason="")
