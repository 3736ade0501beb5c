"""The port of the endpoint: who may ask, and for which session.

    POST /sessions/ID/v1/chat/completions   GET /sessions/ID/v1/models
    POST /sessions/ID/v1/completions

It listens on loopback unless the configuration names another address of this machine. Every worker
draws a token, which its agents send as their API key; it is in no log. A session's path cannot be
guessed and is gone when the session ends.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlcore.agent_loop.endpoint.answers import AnswerForm, ChatAnswer, CompletionAnswer
from rlcore.agent_loop.endpoint.prompts import Plan, PromptEncoder
from rlcore.agent_loop.endpoint.requests import (
    MODEL,
    ChatRequest,
    CompletionRequest,
    Options,
    read_request,
)
from rlcore.agent_loop.endpoint.session import EndpointSession, ended
from rlcore.agent_loop.endpoint.stream import stream
from rlcore.agent_loop.tool_calls import TOOL_CALL_FORMATS
from rlcore.config import RunConfig
from rlcore.errors import ConfigError
from rlcore.json_http import JsonServer, RequestError, read_object
from rlcore.rollout.client import SessionClient

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
            return await stream(request, session, asked, plan, form)
        turn = await session.sample(plan, asked)
        reader = session.reader(asked)
        reader.feed(turn.output.token_ids)
        answer, _ = session.finish(plan, asked, turn, reader)
        return web.json_response(form.whole(answer, turn.output))


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
