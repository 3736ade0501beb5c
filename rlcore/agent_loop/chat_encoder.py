"""Encodes conversations turn by turn: what the model wrote is never encoded again.

The template is rendered once for the start. Later messages are rendered behind a stand-in for the
model's turn, and what follows that turn's end token is encoded alone. Since a special token bounds
it, this gives the tokens of the whole conversation, at a cost that does not grow with it.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from rlcore.data.tokenizer import encode_chat, render_chat
from rlcore.errors import ConfigError

Message = Mapping[str, Any]

STAND_IN = "stand-in for a turn"
_QUESTION = {"role": "user", "content": "question"}
_TOOL = {"role": "tool", "content": "answer", "name": "look_up", "tool_call_id": "call00000"}
_CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "look_up", "arguments": {"key": "value"}},
}
_SCHEMA = {
    "type": "function",
    "function": {"name": "look_up", "description": "x", "parameters": {"type": "object"}},
}


class ChatEncoder:
    """A tokenizer's chat template, checked for conversations of several turns.

    Attributes:
        notices: What a user should know about the template, and what is done about it.
        shows_tools: Whether the template tells the model about `tools`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any],
        stop_token_ids: Sequence[int],
    ) -> None:
        """Probe the template.

        Raises:
            ConfigError: it cannot render tool messages, or nothing ends the model's turn.
        """
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs)
        self._stop_ids = frozenset(stop_token_ids)
        self._model_turn = self._find_model_turn()
        self.shows_tools = self._probe_tools()
        self.notices = self._probe_prefix()
        self.following([_TOOL])

    def start(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """Return the tokens of a conversation, up to where the model's turn begins."""
        kwargs = {**self._kwargs, "tools": list(tools)} if tools else self._kwargs
        return encode_chat(self._tokenizer, messages, kwargs)

    def following(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens between the end of the model's turn and the beginning of its next.

        Args:
            messages: What came after the model's turn, in order.

        Raises:
            ConfigError: the template puts no stop token at the end of the model's turn.
        """
        text = self._render([_QUESTION, self._model_turn, *messages])
        tail = text.partition(STAND_IN)[2]
        ids = self._tokenizer(tail, add_special_tokens=False)["input_ids"]
        for position, token in enumerate(ids):
            if token in self._stop_ids:
                return ids[position + 1 :]
        raise ConfigError(
            "the chat template ends the model's turn without a stop token "
            f"({sorted(self._stop_ids)}), so turns cannot be joined; use another chat_template, or "
            "name its end token in generation_config.json"
        )

    def _render(self, messages: Sequence[Message]) -> str:
        return render_chat(self._tokenizer, messages, self._kwargs)

    def _find_model_turn(self) -> Message:
        """Return a stand-in that the template accepts before a tool message."""
        plain = {"role": "assistant", "content": STAND_IN}
        errors: list[str] = []
        # Some templates refuse a tool's answer to a turn without calls.
        for turn in (plain, {**plain, "tool_calls": [_CALL]}):
            try:
                if STAND_IN in self._render([_QUESTION, turn, _TOOL]):
                    return turn
                errors.append("it leaves the text of the model's turn out")
            except (TemplateError, TypeError, ValueError) as error:
                errors.append(str(error))
        raise ConfigError(
            f"the chat template has no place for tool messages ({'; '.join(errors)}); use a model "
            "or a chat_template with tool calls, or single_turn_agent"
        )

    def _probe_tools(self) -> bool:
        with_tools = render_chat(self._tokenizer, [_QUESTION], {**self._kwargs, "tools": [_SCHEMA]})
        return "look_up" in with_tools

    def _probe_prefix(self) -> list[str]:
        """Compare whole renderings with what the model will have seen; return notices."""
        notices: list[str] = []
        if not self.shows_tools:
            notices.append(
                "the chat template does not show tools to the model: their descriptions are put "
                "into the system message"
            )
        begun = self._render([_QUESTION])
        later = {"role": "user", "content": "next"}
        turns = {"turns": "plain text", "reasoning": "<think>\nthought\n</think>\n\nplain text"}
        for what, text in turns.items():
            turn = {"role": "assistant", "content": text}
            seen = begun + text
            rendered = (self._render([_QUESTION, turn, message]) for message in (_TOOL, later))
            if not all(whole.startswith(seen) for whole in rendered):
                notices.append(
                    f"the chat template changes {what} of the model in earlier turns: the model "
                    "keeps seeing its own tokens as it wrote them, and they are trained on"
                )
                break
        return notices


def chat_encoder(
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
    stop_token_ids: Sequence[int],
) -> ChatEncoder:
    """Return the encoder of a tokenizer, probed once per process.

    Raises:
        ConfigError: the template cannot be used for several turns.
    """
    return _encoder(tokenizer, json.dumps(template_kwargs), tuple(stop_token_ids))


@functools.lru_cache(maxsize=8)
def _encoder(
    tokenizer: PreTrainedTokenizerBase, template_kwargs: str, stop_token_ids: tuple[int, ...]
) -> ChatEncoder:
    return ChatEncoder(tokenizer, json.loads(template_kwargs), stop_token_ids)
