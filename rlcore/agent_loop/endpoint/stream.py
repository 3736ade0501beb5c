"""An answer that is sent while it is sampled, as server-sent events that end in [DONE]."""

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from rlcore.agent_loop.endpoint.answers import AnswerForm, part_from
from rlcore.agent_loop.endpoint.prompts import Plan
from rlcore.agent_loop.endpoint.requests import Options
from rlcore.agent_loop.endpoint.session import EndpointSession
from rlcore.agent_loop.endpoint.turns import Turn
from rlcore.json_http import USER_ERRORS, RequestError, as_request_error
from rlcore.types import TokenOutput

logger = logging.getLogger(__name__)


async def stream(
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
            logger.warning("a stream of the endpoint ends with an error: %s", error)
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
        RequestError: the tokens are others than those that were sent.
    """
    if output.token_ids[: len(sent)] != sent:
        raise RequestError(
            "a replica was lost and the request was made anew with another result than was sent",
            status=500,
        )
    return part_from(output, len(sent))


async def _send(response: web.StreamResponse, event: Mapping[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())
