"""The port of the endpoint: who may ask, for which session, and how answers are sent.

    POST /sessions/ID/v1/chat/completions   GET /sessions/ID/v1/models
    POST /sessions/ID/v1/completions

It listens on loopback unless the configuration names another address of this machine. Every worker
draws a token, which its agents send as their API key; it is in no log. A session's path cannot be
guessed and is gone when the session ends.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlcore.agent_loop.endpoint.answers import (
    AnswerForm,
    ChatAnswer,
    CompletionAnswer,
    part_from,
)
from rlcore.agent_loop.endpoint.prompts import Plan, PromptEncoder
from rlcore.agent_loop.endpoint.requests import (
    MODEL,
    ChatRequest,
    CompletionRequest,
    Options,
    read_request,
)
from rlcore.agent_loop.endpoint.session import EndpointSession, ended
from rlcore.agent_loop.endpoint.turns import Turn
from rlcore.agent_loop.tool_calls import TOOL_CALL_FORMATS
from rlcore.config import RunConfig
from rlcore.errors import ConfigError, RolloutError
from rlcore.json_http import USER_ERRORS, JsonServer, RequestError, as_request_error, read_object
from rlcore.rollout.client import SessionClient
from rlcore.types import TokenOutput

logger = logging.getLogger(__name__)

NAME = "the endpoint"
SHUTDOWN_S = 2.0
"""For answers that are being written; the sessions are over by then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """What an agent needs to reach its session."""

    base_url: str
    api_key: str
    model: str = MODEL


class Endpoint:
    """Serves the sessions of one worker; opens its port for the first one."""

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Make an endpoint without a port.

        Args:
            config: Of the run.
            tokenizer: The policy's.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._host = config.actor_rollout_ref.rollout.agent.endpoint_host
        self._format = TOOL_CALL_FORMATS.get(config.actor_rollout_ref.rollout.multi_turn.format)
        self._token = secrets.token_urlsafe(32)
        self._sessions: dict[str, EndpointSession] = {}
        self._warned: set[str] = set()
        self._starting = asyncio.Lock()
        self._server: JsonServer | None = None
        self._address = ""

    @asynccontextmanager
    async def session(
        self, server: SessionClient, sampling_params: Mapping[str, Any]
    ) -> AsyncIterator[tuple[EndpointSession, Access]]:
        """Serve a session while the block runs.

        Args:
            server: Samples for it.
            sampling_params: Of the run.

        Raises:
            ConfigError: the port cannot be opened, or the tokenizer cannot stream.
        """
        tokenizer = fast(self._tokenizer)
        await self._start()
        session = EndpointSession(
            prompts=PromptEncoder(self._config, tokenizer),
            call_format=self._format,
            tokenizer=tokenizer,
            server=server,
            sampling_params=sampling_params,
        )
        name = secrets.token_urlsafe(16)
        self._sessions[name] = session
        try:
            base_url = f"http://{self._address}/sessions/{name}/v1"
            yield session, Access(base_url=base_url, api_key=self._token)
        finally:
            del self._sessions[name]
            session.close()

    async def close(self) -> None:
        """Close the port."""
        if self._server is not None:
            await self._server.close()

    async def _start(self) -> None:
        async with self._starting:
            if self._server is not None:
                return
            path = "/sessions/{session}/v1"
            server = JsonServer(
                [
                    web.post(f"{path}/chat/completions", self._chat),
                    web.post(f"{path}/completions", self._complete),
                    web.get(f"{path}/models", self._models),
                ],
                name=NAME,
                shutdown_s=SHUTDOWN_S,
            )
            try:
                self._address = await server.start(self._host)
            except OSError as error:
                await server.close()
                raise ConfigError(
                    f"actor_rollout_ref.rollout.agent.endpoint_host={self._host}: {error}"
                ) from error
            self._server = server

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        asked = read_request(ChatRequest, await read_object(request))
        plan = self._plan(session, asked)
        return await self._answer(
            request, session, asked, plan, ChatAnswer(asked, session.tokenizer, plan.ids())
        )

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        asked = read_request(CompletionRequest, await read_object(request))
        plan = self._plan(session, asked)
        return await self._answer(
            request, session, asked, plan, CompletionAnswer(asked, session.tokenizer, plan.ids())
        )

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session_of(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rollflow"}
        return web.json_response({"object": "list", "data": [model]})

    def _session_of(self, request: web.Request) -> EndpointSession:
        """Return the session of a request that may be made."""
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        is_known = secrets.compare_digest(token.strip().encode(), self._token.encode())
        if kind.lower() != "bearer" or not is_known:
            raise RequestError(
                "the API key is missing or wrong: agents are given theirs as api_key",
                status=401,
                code="invalid_api_key",
            )
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            raise ended()
        return session

    def _plan(self, session: EndpointSession, asked: Options) -> Plan:
        for name, value in asked.sampling().items():
            of_run = session.sampling.get(name)
            if value != of_run and name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    "an agent asks for %s=%s and is answered with the run's (%s), for which the "
                    "trainer computes log-probs; further requests are not reported",
                    name, value, "one of its session" if of_run is None else of_run,
                )  # fmt: skip
        return session.plan(asked)

    async def _answer(
        self,
        request: web.Request,
        session: EndpointSession,
        asked: Options,
        plan: Plan,
        form: AnswerForm,
    ) -> web.StreamResponse:
        if asked.stream:
            return await _stream(request, session, asked, plan, form)
        turn = await session.sample(plan, asked)
        reader = session.reader(asked)
        reader.feed(turn.output.token_ids)
        answer, _ = session.finish(plan, asked, turn, reader)
        return web.json_response(form.whole(answer, turn.output))


async def _stream(
    request: web.Request,
    session: EndpointSession,
    asked: Options,
    plan: Plan,
    form: AnswerForm,
) -> web.StreamResponse:
    """Send the response while it is sampled, as server-sent events.

    consumes: what the request has so far, from the client of the replicas, and None at its end
    produces: chunks            waits for: either            unblocked by: replicas, a disconnect
    """
    seen: asyncio.Queue[TokenOutput | None] = asyncio.Queue()
    task = asyncio.ensure_future(session.sample(plan, asked, seen.put_nowait))
    task.add_done_callback(lambda done: _end(done, seen))
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    reader = session.reader(asked)
    sent: list[int] = []
    try:
        output = await seen.get()
        if output is None:
            await task  # what fails before the first token is answered with its status
        await response.prepare(request)
        await _send(response, form.start())
        try:
            while output is not None:
                part = part_from(output, len(sent))
                sent += part.token_ids
                for chunk in form.delta(reader.feed(part.token_ids), part):
                    await _send(response, chunk)
                output = await seen.get()
            turn = await task
            part = _rest(turn.output, sent)
            text = reader.feed(part.token_ids)
            # Recorded before the client can know that it is over, and ask on.
            answer, held = session.finish(plan, asked, turn, reader)
            for chunk in form.end(answer, text + held, part):
                await _send(response, chunk)
            if asked.has_usage_chunk:
                await _send(response, form.usage_chunk(turn.output))
        except USER_ERRORS as error:
            logger.warning("a stream of %s ends with an error: %s", NAME, error)
            await _send(response, as_request_error(error).body())
        await response.write(b"data: [DONE]\n\n")
        return response
    finally:
        task.cancel()


def _end(task: "asyncio.Task[Turn]", seen: "asyncio.Queue[TokenOutput | None]") -> None:
    """Wake the stream; where the client has hung up, nobody asks for the task's error."""
    if not task.cancelled():
        task.exception()
    seen.put_nowait(None)


def _rest(output: TokenOutput, sent: list[int]) -> TokenOutput:
    """Return what was not sent yet.

    Raises:
        RolloutError: the tokens are others than those that were sent.
    """
    if output.token_ids[: len(sent)] != sent:
        raise RolloutError(
            "a replica was lost and the request was made anew with another result than was sent"
        )
    return part_from(output, len(sent))


async def _send(response: web.StreamResponse, event: Mapping[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


def fast(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """Return a tokenizer that can decode token by token.

    Raises:
        ConfigError: it is written in Python.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(
            "the endpoint needs a tokenizer with tokenizer.json: streams are decoded by it"
        )
    return tokenizer
