"""JSON over HTTP as OpenAI's clients speak it: one port, bodies in, answers and errors out.

What cannot be answered is a 4xx and says why; a replica that is not there is 503: an outage looks
like an outage. Errors have OpenAI's form, `{"error": {"message", "type", "code", "param"}}`.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from yarl import URL

from rlcore.errors import RLCoreError, TransientError

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20
SHUTDOWN_S = 60.0
USER_ERRORS = (RLCoreError, TypeError, ValueError)
"""What the content of a request may lead to; anything else is a fault of ours."""


class RequestError(RLCoreError):
    """A request is answered with an error of this status."""

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        """Make an error.

        Args:
            message: For a person.
            status: Of HTTP.
            code: OpenAI's word for it, for programs.
            param: The option at fault.
        """
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """Return the answer's JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "code": self.code, "param": self.param}
        return {"error": error}


def as_request_error(error: Exception) -> RequestError:
    """Return what an error means for the client whose request led to it."""
    if isinstance(error, RequestError):
        return error
    return RequestError(str(error), status=503 if isinstance(error, TransientError) else 400)


async def read_object(request: web.Request) -> dict[str, Any]:
    """Return the JSON object in a request's body.

    Raises:
        RequestError: there is none.
    """
    try:
        body = await request.json()
    except ValueError as error:
        raise RequestError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def answering(answer: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]) -> Handler:
    """Return a handler that passes the body's object on and answers with what it gets."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response(await answer(await read_object(request)))

    return handle


def usage(num_prompt: int, num_new: int) -> dict[str, int]:
    """Return an answer's count of tokens."""
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
    }


class JsonServer:
    """One port with some routes.

    Example:
        >>> server = JsonServer([web.get("/health", healthy)], name="the reward model")
        >>> address = await server.start("127.0.0.1")
    """

    def __init__(
        self, routes: Iterable[web.RouteDef], *, name: str, shutdown_s: float = SHUTDOWN_S
    ) -> None:
        """Make a server; `start` opens its port.

        Args:
            routes: Handlers by method and path.
            name: In log records of refused requests.
            shutdown_s: How long `close` waits for requests in flight.
        """
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_json(name)])
        app.add_routes(routes)
        # A client that was killed or has hung up reads no answer: its request must not go on.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=shutdown_s
        )

    async def start(self, host: str) -> str:
        """Open a free port; return `host:port`.

        Raises:
            OSError: the host is no address of this machine.
        """
        await self._runner.setup()
        await web.TCPSite(self._runner, host, 0).start()
        port = self._runner.addresses[0][1]
        return URL.build(scheme="http", host=host, port=port).authority

    async def close(self) -> None:
        """Close the port."""
        await self._runner.cleanup()


def _errors_as_json(name: str) -> Middleware:
    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            # No such path, wrong method, a body that is too large.
            return refused(RequestError(error.reason, status=error.status), name)
        except USER_ERRORS as error:
            return refused(as_request_error(error), name)

    return middleware


def refused(error: RequestError, name: str) -> web.Response:
    """Return the answer to a request that cannot be served, and log it."""
    logger.warning("a request to %s is answered %d: %s", name, error.status, error)
    headers = {"WWW-Authenticate": "Bearer"} if error.status == HTTPStatus.UNAUTHORIZED else None
    return web.json_response(error.body(), status=error.status, headers=headers)
