"""The built-in agent loop with tools (verl's name and semantics).

    pending -> generating -> processing_tools -> generating -> ... -> terminated

Tokens go in and out unchanged: each turn asks the engine with all tokens so far, and only for the
budget that is left of the response.
"""

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlcore.agent_loop.base import AgentLoopBase, register
from rlcore.agent_loop.chat_encoder import encoder_of
from rlcore.agent_loop.tool_calls import TOOL_CALL_FORMATS
from rlcore.agent_loop.transcript import Transcript, why_stop
from rlcore.config import RunConfig
from rlcore.errors import ConfigError, DataError
from rlcore.tools.calls import InvalidCall, ToolCall
from rlcore.tools.functions import ToolAnswer
from rlcore.types import AgentLoopOutput


class State(StrEnum):
    """Where a session is."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    TERMINATED = "terminated"


@dataclass(kw_only=True, slots=True)
class _Session(Transcript):
    """What a session has so far."""

    schemas: list[dict[str, Any]]
    sampling_params: dict[str, Any]
    calls: list[ToolCall | InvalidCall] = field(default_factory=list[ToolCall | InvalidCall])
    tool_rewards: list[float] = field(default_factory=list[float])
    num_calls: int = 0
    num_invalid: int = 0


@register("tool_agent")
class ToolAgentLoop(AgentLoopBase):
    """Lets the model call the functions of `multi_turn.function_tool_path`."""

    @classmethod
    def check_at_start(cls, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Probe the chat template.

        Raises:
            ConfigError: it cannot be used for tools, or there are none.
        """
        if config.actor_rollout_ref.rollout.multi_turn.function_tool_path is None:
            raise ConfigError(
                "tool_agent needs tools: set actor_rollout_ref.rollout.multi_turn."
                "function_tool_path to a Python file with functions marked @function_tool"
            )
        return encoder_of(config, tokenizer).notices

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Return the one trajectory of the session."""
        self._settings = self.config.actor_rollout_ref.rollout.multi_turn
        self._format = TOOL_CALL_FORMATS.get(self._settings.format)
        self._encoder = encoder_of(self.config, self.tokenizer)
        self._max_tokens = self.data_config.max_response_length
        self._request_id = uuid.uuid4().hex
        session = self._begin(sampling_params, row)
        state = State.GENERATING
        while state is not State.TERMINATED:
            if state is State.GENERATING:
                state = await self._generate(session)
            else:
                state = await self._process_tools(session)
        return _output(session)

    def _begin(self, sampling_params: dict[str, Any], row: Mapping[str, Any]) -> _Session:
        schemas = self._select_tools((row.get("extra_info") or {}).get("tool_selection"))
        prompt_ids = self._format.encode_start(self._encoder, row["raw_prompt"], schemas)
        limit = self.data_config.max_prompt_length
        if len(prompt_ids) > limit:
            raise DataError(
                f"the prompt with the descriptions of its tools has {len(prompt_ids)} tokens, more "
                f"than data.max_prompt_length={limit}"
            )
        return _Session(schemas=schemas, sampling_params=sampling_params, prompt_ids=prompt_ids)

    def _select_tools(self, names: Sequence[str] | None) -> list[dict[str, Any]]:
        tools = self.tools.tools
        unknown = [name for name in names or [] if name not in tools]
        if unknown:
            raise DataError(
                f"extra_info.tool_selection names {', '.join(unknown)}; there are "
                f"{', '.join(tools)}"
            )
        return [tool.schema for name, tool in tools.items() if names is None or name in names]

    async def _generate(self, session: _Session) -> State:
        """Sample one turn and decide what follows."""
        started = time.monotonic()
        output = await self.server_manager.generate(
            self._request_id,
            [*session.prompt_ids, *session.ids],
            {**session.sampling_params, "max_tokens": self._max_tokens - len(session.ids)},
        )
        session.generate_s += time.monotonic() - started
        session.add_sampled(output)
        session.stop = why_stop(session, output, self._settings, self._max_tokens)
        if session.stop:
            return State.TERMINATED
        text = self.tokenizer.decode(output.token_ids, skip_special_tokens=False)
        assert isinstance(text, str)  # one sequence gives one text
        session.calls = self._format.parse(self.tokenizer, text, session.schemas)
        if not session.calls:
            session.stop = "answered"
            return State.TERMINATED
        return State.PROCESSING_TOOLS

    async def _process_tools(self, session: _Session) -> State:
        """Run the turn's calls at the same time and append their answers, if they fit."""
        started = time.monotonic()
        calls = session.calls[: self._settings.max_parallel_calls]
        allowed = {schema["function"]["name"] for schema in session.schemas}
        answers = await asyncio.gather(*(self._call(call, allowed) for call in calls))
        session.answer_s += time.monotonic() - started
        session.num_calls += len(answers)
        session.num_invalid += sum(answer.is_error for answer in answers)
        session.tool_rewards += [a.reward for a in answers if a.reward is not None]
        limit = self._settings.max_invalid_calls
        if limit is not None and session.num_invalid >= limit:
            session.stop = "max_invalid_calls"
            return State.TERMINATED
        messages = [
            {
                "role": "tool",
                "content": answer.text,
                "name": call.name if isinstance(call, ToolCall) else "unknown",
                "tool_call_id": f"call{number:05d}",
            }
            for number, (call, answer) in enumerate(zip(calls, answers, strict=True))
        ]
        ids = self._encoder.following(messages)
        if len(session.ids) + len(ids) >= self._max_tokens:
            session.stop = "length"
            return State.TERMINATED
        session.add_context(ids)
        return State.GENERATING

    async def _call(self, call: ToolCall | InvalidCall, allowed: set[str]) -> ToolAnswer:
        if isinstance(call, ToolCall) and call.name in self.tools.tools.keys() - allowed:
            call = InvalidCall(reason=f"the tool {call.name} is not available here")
        return await self.tools.call(call)


def _output(session: _Session) -> AgentLoopOutput:
    return session.output(
        metrics={
            "num_tool_calls": float(session.num_calls),
            "num_invalid_calls": float(session.num_invalid),
        },
        extra_fields={"tool_rewards": session.tool_rewards},
    )
