"""Calls to a Ray actor from ordinary code: a deadline, and errors of ours instead of Ray's."""

import asyncio
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rlcore.errors import ActorUnavailableError, DeadlineExceededError, RLCoreError


def wait_for_reply(reply: ray.ObjectRef, *, what: str, deadline_s: float) -> Any:
    """Return the result of an actor call, waiting `deadline_s` at most.

    Args:
        reply: What `handle.method.remote(...)` returned.
        what: Callee and method, for the message.
        deadline_s: On the caller's monotonic clock.

    Raises:
        DeadlineExceededError: no answer in time.
        ActorUnavailableError: the callee's process died.
        RLCoreError: what the callee raised, if it is one of ours; other errors keep Ray's
            type, which holds the remote traceback.
    """
    try:
        return ray.get(reply, timeout=deadline_s)
    except GetTimeoutError:
        raise DeadlineExceededError(f"{what} did not answer within {deadline_s:g} s") from None
    except RayActorError as error:
        raise ActorUnavailableError(f"{what}: the actor's process is gone: {error}") from error
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, RLCoreError):
            raise cause from error
        raise


def kill_actor(handle: ActorHandle) -> None:
    """Kill an actor's process for good; one that is dead already is fine.

    Once Ray has ended in this process nothing is left to kill, and a call would start Ray anew.
    """
    if ray.is_initialized():
        ray.kill(handle, no_restart=True)


async def await_reply(reply: ray.ObjectRef, *, what: str, deadline_s: float | None) -> Any:
    """Return the result of an actor call without blocking the event loop.

    Args:
        reply: What `handle.method.remote(...)` returned.
        what: Callee and method, for the message.
        deadline_s: None where the caller has a deadline of its own round this call.

    Raises:
        DeadlineExceededError: no answer in time.
        ActorUnavailableError: the callee's process died.
        RLCoreError: what the callee raised, if it is one of ours; other errors keep Ray's
            type, which holds the remote traceback.
    """
    deadline = asyncio.timeout(deadline_s)
    try:
        async with deadline:
            return await reply
    except RayActorError as error:
        raise ActorUnavailableError(f"{what}: the actor's process is gone: {error}") from error
    except RayTaskError as error:
        # Before TimeoutError: Ray's copy of a remote TimeoutError is both.
        cause = error.cause
        if isinstance(cause, RLCoreError):
            raise cause from error
        raise
    except TimeoutError:
        if not deadline.expired():
            raise
        raise DeadlineExceededError(f"{what} did not answer within {deadline_s:g} s") from None
