"""One session behind the endpoint: its requests, what they continue, and what they recorded."""

import asyncio
import time
import uuid
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerFast

from rlcore.agent_loop.endpoint.answers import Answer, tool_calls_json
from rlcore.agent_loop.endpoint.history import History
from rlcore.agent_loop.endpoint.messages import answer_message, key_of
from rlcore.agent_loop.endpoint.prompts import Plan, PromptEncoder
from rlcore.agent_loop.endpoint.requests import ChatRequest, CompletionRequest, Options
from rlcore.agent_loop.endpoint.text import TextReader
from rlcore.agent_loop.endpoint.turns import Turn, trajectories
from rlcore.agent_loop.tool_calls import ToolCallFormat
from rlcore.errors import RolloutError, TransientError
from rlcore.json_http import RequestError
from rlcore.rollout.client import SessionClient, Watcher
from rlcore.tools.calls import ToolCall
from rlcore.types import AgentLoopOutput, TokenOutput


def ended() -> RequestError:
    """Return the answer to requests of a session that is over, or never was."""
    return RequestError("there is no such session, or it has ended", status=404, code="not_found")


class EndpointSession:
    """What an agent's requests do.

    Attributes:
        outage: Why the last request failed, if a replica was not there.
    """

    def __init__(
        self,
        *,
        prompts: PromptEncoder,
        call_format: ToolCallFormat,
        tokenizer: PreTrainedTokenizerFast,
        server: SessionClient,
        sampling_params: Mapping[str, Any],
    ) -> None:
        """Begin a session without requests.

        Args:
            prompts: Of the run.
            call_format: How the model writes tool calls.
            tokenizer: The policy's.
            server: Samples.
            sampling_params: Of the run.
        """
        self.outage: TransientError | None = None
        self.tokenizer = tokenizer
        self._prompts = prompts
        self._format = call_format
        self._server = server
        self._sampling_params = sampling_params
        self._history = History()
        self._num_calls = 0
        self._running: set[asyncio.Task[TokenOutput]] = set()
        self._is_closed = False

    @property
    def sampling(self) -> dict[str, Any]:
        """How tokens are sampled, as a request would ask for it."""
        params = self._sampling_params
        temperature = params["temperature"] if params.get("do_sample", True) else 0.0
        return {"temperature": temperature, "top_p": params["top_p"], "top_k": params["top_k"]}

    def trajectories(self) -> list[AgentLoopOutput]:
        """Return what the finished requests make."""
        return trajectories(self._history.turns)

    def close(self) -> None:
        """Answer no more; requests in flight are told so."""
        self._is_closed = True
        for task in self._running:
            task.cancel()

    def plan(self, request: Options) -> Plan:
        """Return what the model reads for a request.

        Raises:
            RequestError: it cannot be answered.
        """
        if self._is_closed:
            raise ended()
        if isinstance(request, ChatRequest):
            plan = self._prompts.plan_chat(self._history, request)
        else:
            assert isinstance(request, CompletionRequest), "there are two kinds of requests"
            plan = self._prompts.plan_completion(self._history, request)
        if plan.parent is not None:
            plan.parent.num_begun += 1
        return plan

    def reader(self, request: Options) -> TextReader:
        """Return what reads the response to a request."""
        may_call = isinstance(request, ChatRequest) and request.may_call
        opening = self._format.opening if may_call else None
        return TextReader(self.tokenizer, stops=request.stops, opening=opening)

    async def sample(self, plan: Plan, request: Options, on_partial: Watcher | None = None) -> Turn:
        """Sample the response; it is not recorded yet.

        Raises:
            RequestError: the session ended meanwhile, or a replica broke its contract.
            TransientError: a replica is not there.
        """
        params = {**self._sampling_params}
        params["max_tokens"] = min(request.wanted_tokens or plan.num_left, plan.num_left)
        if request.stops:
            params["stop"] = request.stops
        began = time.monotonic()
        task = asyncio.ensure_future(
            self._server.generate(uuid.uuid4().hex, plan.ids(), params, on_partial=on_partial)
        )
        self._running.add(task)
        try:
            output = await task
        except TransientError as error:
            self.outage = error
            raise
        except RolloutError as error:
            # Not the request's fault, nor one that passes.
            raise RequestError(str(error), status=500) from error
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if self._is_closed and own is not None and not own.cancelling():
                raise ended() from None
            raise
        finally:
            self._running.discard(task)
        self.outage = None
        return Turn(
            context_ids=plan.context_ids,
            output=output,
            parent=plan.parent,
            generate_s=time.monotonic() - began,
        )

    def finish(
        self, plan: Plan, request: Options, turn: Turn, reader: TextReader
    ) -> tuple[Answer, str]:
        """Record a turn; return what it says, and the part of its text that was held back.

        Args:
            plan: Of the request.
            request: What was asked.
            turn: What was sampled.
            reader: Has read all of it.
        """
        calls = self._calls(request, turn.output)
        rest = reader.finish(has_calls=bool(calls))
        tool_calls = tool_calls_json(calls, self._num_calls)
        self._num_calls += len(calls)
        is_complete = turn.output.stop_reason == "completed"
        reason = "tool_calls" if calls else "stop" if is_complete else "length"
        answer = Answer(text=reader.text, finish_reason=reason, tool_calls=tool_calls)
        self._record(plan, request, turn, answer, reader)
        return answer, rest

    def _record(
        self, plan: Plan, request: Options, turn: Turn, answer: Answer, reader: TextReader
    ) -> None:
        if isinstance(request, ChatRequest):
            key = key_of(answer_message(answer.text, answer.tool_calls))
            self._history.add_chat(turn, (*plan.keys, key))
            return
        assert isinstance(request, CompletionRequest), "there are two kinds of requests"
        # An empty response cannot be told from the prompt asked again.
        if isinstance(request.prompt, str) and answer.text:
            seen = request.prompt + answer.text
            self._history.add_text(turn, seen, reader.hidden(turn.output.token_ids))
        else:
            self._history.add_ids(turn)

    def _calls(self, request: Options, output: TokenOutput) -> list[ToolCall]:
        """Return the calls of a response; none where one of them cannot be read or was cut off."""
        is_complete = output.stop_reason == "completed"
        if not (isinstance(request, ChatRequest) and request.may_call and is_complete):
            return []
        text = str(self.tokenizer.decode(output.token_ids, skip_special_tokens=False))
        found = self._format.parse(self.tokenizer, text, request.schemas)
        calls = [call for call in found if isinstance(call, ToolCall)]
        return calls if len(calls) == len(found) else []
