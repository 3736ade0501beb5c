"""Finds tool calls in what a model wrote: formats as response templates of transformers' parser.

transformers parses without torch and streams nothing here: the turn is complete. A block that
cannot be read becomes an `InvalidCall`, which the model is told of.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlcore.agent_loop.chat_encoder import ChatEncoder, Message
from rlcore.registry import Registry
from rlcore.tools.calls import InvalidCall, ToolCall


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallFormat:
    """How a family of models writes calls."""

    response_template: Mapping[str, Any]
    """For `tokenizer.parse_response`; gives a list `tool_calls`."""
    instructions: str
    """Tells a model about the format whose chat template does not."""
    opening: str = "<tool_call>"
    """Text with which a call begins."""

    def parse(
        self, tokenizer: PreTrainedTokenizerBase, text: str, tools: Sequence[Mapping[str, Any]]
    ) -> list[ToolCall | InvalidCall]:
        """Return the calls of one turn, in order; what is in the model's reasoning is none.

        Args:
            tokenizer: Has the parser.
            text: The turn, with its special tokens.
            tools: OpenAI schemas; arguments written as text get their types.
        """
        head, closes, _ = text.partition("</think>")
        if closes and "<think>" not in head:
            # The prompt had opened the reasoning.
            text = f"<think>{text}"
        try:
            message = tokenizer.parse_response(
                text, dict(self.response_template), prefix="", tools=[dict(tool) for tool in tools]
            )
        except ValueError as error:
            return [InvalidCall(reason=str(error))]
        assert isinstance(message, dict)  # one turn gives one message
        return [_call_of(found) for found in message.get("tool_calls", [])]

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the system message's part about tools."""
        listed = "\n".join(json.dumps(tool) for tool in tools)
        return f"You can call these tools:\n<tools>\n{listed}\n</tools>\n{self.instructions}"

    def encode_start(
        self,
        encoder: ChatEncoder,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> list[int]:
        """Return the tokens of a conversation's start, in which the model is told of its tools.

        Args:
            encoder: Of the run; where its template shows no tools, the system message does.
            messages: The conversation.
            tools: OpenAI schemas.
        """
        if tools and not encoder.shows_tools:
            return encoder.start(_with_system(messages, self.describe(tools)))
        return encoder.start(messages, tools)


TOOL_CALL_FORMATS: Registry[ToolCallFormat] = Registry("tool call format")

_START = "<|im_start|>assistant\n"
_ARGUMENT = r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
_REASONING = {"open": "<think>", "close": "</think>", "content": "text"}

TOOL_CALL_FORMATS.register("hermes")(
    ToolCallFormat(
        response_template={
            "start_anchor": _START,
            "fields": {
                "content": {"content": "text"},
                "reasoning_content": _REASONING,
                "tool_calls": {
                    "open": "<tool_call>",
                    "close": "</tool_call>",
                    "content": "json",
                    "content_args": {"allow_non_json": True},
                    "repeats": True,
                },
            },
        },
        instructions=(
            "To call one, write its name and arguments as JSON:\n"
            '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
        ),
    )
)

TOOL_CALL_FORMATS.register("qwen3_coder")(
    ToolCallFormat(
        response_template={
            "start_anchor": _START,
            "fields": {
                "content": {"content": "text"},
                "reasoning_content": _REASONING,
                "tool_calls": {
                    "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]*)>",
                    "close_pattern": r"</function>\s*</tool_call>",
                    "content": "xml-inline",
                    "content_args": {"tag_pattern": _ARGUMENT},
                    "repeats": True,
                    "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
                },
            },
        },
        instructions=(
            "To call one, write its name and each argument in tags:\n"
            "<tool_call>\n<function=NAME>\n<parameter=ARGUMENT>\nvalue\n</parameter>\n"
            "</function>\n</tool_call>"
        ),
    )
)


def _with_system(messages: Sequence[Message], text: str) -> list[Message]:
    """Put a text at the end of the system message, which is made if there is none."""
    if messages and messages[0]["role"] == "system":
        system = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [system, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _call_of(found: Any) -> ToolCall | InvalidCall:
    call = found.get("function", found) if isinstance(found, dict) else found
    if not isinstance(call, dict):
        return InvalidCall(reason="the tool call is not valid JSON")
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not name:
        return InvalidCall(reason="the tool call has no name")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return InvalidCall(reason="the tool call's arguments are not valid JSON")
    if not isinstance(arguments, dict):
        return InvalidCall(reason="the tool call's arguments are not an object")
    return ToolCall(name=name, arguments=arguments)
