"""Which tokens the model reads for a request: those of the turn it continues and what is new.

What the model wrote is never encoded again. Only what came after it is, behind a stand-in for the
model's turn (`ChatEncoder`) or, for texts, by itself.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from rlcore.agent_loop.chat_encoder import ChatEncoder, encoder_of
from rlcore.agent_loop.endpoint.history import History, Keys
from rlcore.agent_loop.endpoint.messages import Message, key_of, read_messages
from rlcore.agent_loop.endpoint.requests import ChatRequest, CompletionRequest
from rlcore.agent_loop.endpoint.turns import Turn
from rlcore.agent_loop.tool_calls import TOOL_CALL_FORMATS
from rlcore.config import RunConfig
from rlcore.data.tokenizer import TEMPLATE_ERRORS
from rlcore.json_http import RequestError

TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a request lets the model read."""

    parent: Turn | None
    """The turn that it continues."""
    context_ids: list[int]
    """What comes after that one's tokens; without one the prompt."""
    num_left: int
    """Tokens that fit into the response still."""
    keys: Keys = ()
    """Of a conversation's tools and messages."""

    def ids(self) -> list[int]:
        """Return all tokens that the model reads."""
        return [*(self.parent.ids() if self.parent is not None else []), *self.context_ids]


class PromptEncoder:
    """Plans the requests of a run's sessions."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerFast) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._max_prompt = config.data.max_prompt_length
        self._max_response = config.data.max_response_length
        self._format = TOOL_CALL_FORMATS.get(config.actor_rollout_ref.rollout.multi_turn.format)

    def plan_chat(self, history: History, request: ChatRequest) -> Plan:
        """Return what the model reads for a conversation.

        Raises:
            RequestError: the chat template refuses the messages, or they are too long.
        """
        messages = read_messages(request.messages)
        tools = request.schemas
        keys = (json.dumps(tools, sort_keys=True), *map(key_of, messages))
        turn, num_known = history.find_chat(keys) or (None, 0)
        try:
            encoder = self._encoder(messages, tools)
            if turn is None:
                ids = self._format.encode_start(encoder, messages, tools)
            else:
                is_ended = encoder.ends_turn(turn.output.token_ids)
                ids = encoder.following(messages[num_known:], is_ended=is_ended)
        except TEMPLATE_ERRORS as error:
            raise RequestError(
                f"the chat template refuses the messages: {error}", param="messages"
            ) from error
        return self._plan(turn, ids, "messages", keys)

    def plan_completion(self, history: History, request: CompletionRequest) -> Plan:
        """Return what the model reads for a text or for token ids.

        Raises:
            RequestError: a token id is none, or the prompt is too long.
        """
        if isinstance(request.prompt, str):
            if found := history.find_text(request.prompt):
                turn, rest = found
                ids = self._tokenizer(rest, add_special_tokens=False)["input_ids"]
                return self._plan(turn, ids, "prompt")
            return self._plan(None, self._encode(request.prompt), "prompt")
        wrong = [token for token in request.prompt if not 0 <= token < len(self._tokenizer)]
        if wrong:
            raise RequestError(
                f"prompt: {wrong[0]} is none of the model's {len(self._tokenizer)} token ids",
                param="prompt",
            )
        turn, ids = history.find_ids(request.prompt) or (None, request.prompt)
        return self._plan(turn, list(ids), "prompt")

    def _encode(self, text: str) -> list[int]:
        """Return a prompt's tokens, with the special ones that the model expects first."""
        bos = self._tokenizer.bos_token
        is_begun = isinstance(bos, str) and text.startswith(bos)
        return self._tokenizer(text, add_special_tokens=not is_begun)["input_ids"]

    def _encoder(self, messages: Sequence[Message], tools: Sequence[Message]) -> ChatEncoder:
        # Templates that cannot render tools are fine for conversations without.
        uses_tools = bool(tools) or any(message["role"] == "tool" for message in messages)
        return encoder_of(self._config, self._tokenizer, uses_tools=uses_tools)

    def _plan(self, parent: Turn | None, ids: list[int], param: str, keys: Keys = ()) -> Plan:
        if parent is None:
            num_left = self._max_response
            if len(ids) > self._max_prompt:
                raise RequestError(
                    f"the prompt has {len(ids)} tokens, more than "
                    f"data.max_prompt_length={self._max_prompt}",
                    code=TOO_LONG,
                    param=param,
                )
        else:
            num_left = self._max_response - parent.num_response_tokens() - len(ids)
        if num_left < 1:
            raise RequestError(
                "everything after the first prompt of the conversation has "
                f"{self._max_response - num_left} tokens, which leaves none of "
                f"data.max_response_length={self._max_response} to be sampled",
                code=TOO_LONG,
                param=param,
            )
        return Plan(parent=parent, context_ids=ids, num_left=num_left, keys=keys)
