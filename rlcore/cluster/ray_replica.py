"""Generation on a replica's actor; imports no engine, since agent loop workers need none."""

import asyncio
from typing import Any

import ray

from rlcore.cluster.calls import await_reply
from rlcore.errors import DeadlineExceededError
from rlcore.types import TokenOutput

PARTIAL_DEADLINE_S = 10.0
"""For a replica to say what a request has so far; a busier one is asked again later."""


class RayReplica:
    """A replica's actor as the router's client needs it (`rlcore.rollout.router.ReplicaHandle`).

    Errors arrive as the replica raised them; the death of its process is an ActorUnavailableError.
    """

    def __init__(self, handle: Any, name: str) -> None:
        self.handle = handle
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RayReplica) and self.handle == other.handle

    def __hash__(self) -> int:
        return hash(self.handle)

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        """Sample a response; the session's deadline is round it.

        Raises:
            ActorUnavailableError: the replica died.
            RLCoreError: as LLMServer.generate.
        """
        reply = self.handle.generate.remote(request_id, prompt_ids, sampling_params)
        try:
            return await await_reply(reply, what=f"{self.name}.generate", deadline_s=None)
        except asyncio.CancelledError:
            # The session is over; its slot must not go on.
            ray.cancel(reply)
            raise

    async def partial(self, request_id: str) -> TokenOutput | None:
        """Return what a request has sampled so far; None also when the replica is too busy.

        Raises:
            ActorUnavailableError: the replica died.
        """
        reply = self.handle.partial.remote(request_id)
        try:
            return await await_reply(
                reply, what=f"{self.name}.partial", deadline_s=PARTIAL_DEADLINE_S
            )
        except DeadlineExceededError:
            return None
