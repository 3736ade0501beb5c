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

from rlcore.config import RunConfig
from rlcore.data.tokenizer import encode_chat, render_chat, stop_token_ids
from rlcore.errors import ConfigError

Message = Mapping[str, Any]

STAND_IN = "stand-in for a turn"
_QUESTION = {"role": "user", "content": "question"}
_NEXT = {"role": "user", "content": "next"}
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
        *,
        uses_tools: bool = True,
    ) -> None:
        """Probe the template.

        Args:
            tokenizer: Has the template.
            template_kwargs: For the template.
            stop_token_ids: End the model's turn.
            uses_tools: The model is answered by tools; else by a user.

        Raises:
            ConfigError: it cannot render the answers, or nothing ends the model's turn.
        """
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs)
        self._stop_ids = frozenset(stop_token_ids)
        self._answer = _TOOL if uses_tools else _NEXT
        self._model_turn = self._find_model_turn()
        self.shows_tools = uses_tools and self._probe_tools()
        self.notices = self._probe_prefix(uses_tools)
        self.following([self._answer])

    def start(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """Return the tokens of a conversation, up to where the model's turn begins."""
        kwargs = {**self._kwargs, "tools": list(tools)} if tools else self._kwargs
        return encode_chat(self._tokenizer, messages, kwargs)

    def ends_turn(self, token_ids: Sequence[int]) -> bool:
        """Whether the model has ended its turn itself: it was not cut off."""
        return bool(token_ids) and token_ids[-1] in self._stop_ids

    def following(self, messages: Sequence[Message], *, is_ended: bool = True) -> list[int]:
        """Return the tokens between the end of the model's turn and the beginning of its next.

        Args:
            messages: What came after the model's turn, in order.
            is_ended: The turn has its end token; else it is closed as the template does it.

        Raises:
            ConfigError: the template puts no stop token at the end of the model's turn.
        """
        text = self._render([_QUESTION, self._model_turn, *messages])
        tail = text.partition(STAND_IN)[2]
        ids = self._tokenizer(tail, add_special_tokens=False)["input_ids"]
        for position, token in enumerate(ids):
            if token in self._stop_ids:
                return ids[position + 1 :] if is_ended else ids
        raise ConfigError(
            "the chat template ends the model's turn without a stop token "
            f"({sorted(self._stop_ids)}), so turns cannot be joined; use another chat_template, or "
            "name its end token in generation_config.json"
        )

    def _render(self, messages: Sequence[Message]) -> str:
        return render_chat(self._tokenizer, messages, self._kwargs)

    def _find_model_turn(self) -> Message:
        """Return a stand-in that the template accepts before an answer."""
        plain = {"role": "assistant", "content": STAND_IN}
        errors: list[str] = []
        # Some templates refuse a tool's answer to a turn without calls.
        for turn in (plain, {**plain, "tool_calls": [_CALL]}):
            try:
                if STAND_IN in self._render([_QUESTION, turn, self._answer]):
                    return turn
                errors.append("it leaves the text of the model's turn out")
            except (TemplateError, TypeError, ValueError) as error:
                errors.append(str(error))
        raise ConfigError(
            f"the chat template has no place for {self._answer['role']} messages after the model's "
            f"turn ({'; '.join(errors)}); use another model or chat_template, or single_turn_agent"
        )

    def _probe_tools(self) -> bool:
        with_tools = render_chat(self._tokenizer, [_QUESTION], {**self._kwargs, "tools": [_SCHEMA]})
        return "look_up" in with_tools

    def _probe_prefix(self, uses_tools: bool) -> list[str]:
        """Compare whole renderings with what the model will have seen; return notices."""
        notices: list[str] = []
        if uses_tools and not self.shows_tools:
            notices.append(
                "the chat template does not show tools to the model: their descriptions are put "
                "into the system message"
            )
        begun = self._render([_QUESTION])
        answers = (_TOOL, _NEXT) if uses_tools else (_NEXT,)
        turns = {"turns": "plain text", "reasoning": "<think>\nthought\n</think>\n\nplain text"}
        for what, text in turns.items():
            turn = {"role": "assistant", "content": text}
            seen = begun + text
            rendered = (self._render([_QUESTION, turn, message]) for message in answers)
            if not all(whole.startswith(seen) for whole in rendered):
                notices.append(
                    f"the chat template changes {what} of the model in earlier turns: the model "
                    "keeps seeing its own tokens as it wrote them, and they are trained on"
                )
                break
        return notices


def encoder_of(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, uses_tools: bool = True
) -> ChatEncoder:
    """Return the encoder of a run.

    Raises:
        ConfigError: the template cannot be used for several turns.
    """
    stops = _stop_ids(config.actor_rollout_ref.model.path, tokenizer)
    kwargs = config.data.apply_chat_template_kwargs
    return chat_encoder(tokenizer, kwargs, stops, uses_tools=uses_tools)


def chat_encoder(
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: Mapping[str, Any],
    stop_token_ids: Sequence[int],
    *,
    uses_tools: bool = True,
) -> ChatEncoder:
    """Return the encoder of a tokenizer, probed once per process.

    Raises:
        ConfigError: the template cannot be used for several turns.
    """
    return _encoder(tokenizer, json.dumps(template_kwargs), tuple(stop_token_ids), uses_tools)


@functools.lru_cache(maxsize=8)
def _stop_ids(model_path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return stop_token_ids(model_path, tokenizer)


@functools.lru_cache(maxsize=8)
def _encoder(
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: str,
    stop_token_ids: tuple[int, ...],
    uses_tools: bool,
) -> ChatEncoder:
    return ChatEncoder(
        tokenizer, json.loads(template_kwargs), stop_token_ids, uses_tools=uses_tools
    )
