"""Replicas as Ray actors, and the client that everybody else holds.

The actor is a thin shell round `rlcore.rollout.server.LLMServer`. Generation and control have
concurrency groups of their own: a control call is never queued behind thousands of requests.
"""

import asyncio
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from rlcore.errors import ActorUnavailableError, DeadlineExceededError, RLCoreError
from rlcore.rollout.engine import ENGINES, EngineSpec
from rlcore.rollout.server import LLMServer
from rlcore.types import CallKey, TokenOutput, WeightMeta

MAX_REQUESTS = 4096
"""Requests that one replica holds at a time; more wait in Ray."""


@ray.remote(num_cpus=1, max_restarts=0, concurrency_groups={"control": 8, "generate": MAX_REQUESTS})
class LLMServerActor:
    """One replica in a process of its own; see LLMServer for what the methods do."""

    def __init__(self, spec: EngineSpec, run_id: str, attempt: int, name: str) -> None:
        self._server = LLMServer(
            lambda: ENGINES.get(spec.name)(spec), run_id=run_id, attempt=attempt, name=name
        )

    @ray.method(concurrency_group="generate")
    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        """Sample a response."""
        return await self._server.generate(request_id, prompt_ids, sampling_params)

    @ray.method(concurrency_group="generate")
    async def partial(self, request_id: str) -> TokenOutput | None:
        """Return what a request has sampled so far."""
        return await self._server.partial(request_id)

    @ray.method(concurrency_group="control")
    async def abort(self, key: CallKey) -> int:
        """End what runs and close the gate."""
        return await self._server.abort(key)

    @ray.method(concurrency_group="control")
    async def pause(self, key: CallKey, keep: bool) -> None:
        """Close the gate; freeze or drain."""
        await self._server.pause(key, keep)

    @ray.method(concurrency_group="control")
    async def resume(self, key: CallKey) -> None:
        """Open the gate."""
        await self._server.resume(key)

    @ray.method(concurrency_group="control")
    async def sleep(self, key: CallKey) -> None:
        """Free the memory of keys and values."""
        await self._server.sleep(key)

    @ray.method(concurrency_group="control")
    async def wake_up(self, key: CallKey) -> None:
        """Get the memory again."""
        await self._server.wake_up(key)

    @ray.method(concurrency_group="control")
    async def prepare_weights(self, key: CallKey, version: int) -> None:
        """Close the gate for a weight update."""
        await self._server.prepare_weights(key, version)

    @ray.method(concurrency_group="control")
    async def load_weights(self, key: CallKey, meta: WeightMeta) -> dict[str, Any]:
        """Load published weights."""
        return await self._server.load_weights(key, meta)

    @ray.method(concurrency_group="control")
    async def commit_weights(self, key: CallKey, version: int) -> None:
        """Serve the loaded weights."""
        await self._server.commit_weights(key, version)

    @ray.method(concurrency_group="control")
    async def abandon_weights(self, key: CallKey, version: int) -> None:
        """Give a weight update up."""
        await self._server.abandon_weights(key, version)

    @ray.method(concurrency_group="control")
    async def health(self) -> dict[str, Any]:
        """Return state and counters."""
        return await self._server.health()

    @ray.method(concurrency_group="control")
    async def wait_ready(self, deadline_s: float) -> None:
        """Return when the engine is built."""
        await self._server.wait_ready(deadline_s)

    @ray.method(concurrency_group="control")
    async def close(self) -> None:
        """End the engine thread."""
        await self._server.close()


LLMServerActor: Any = ray.remote(
    max_restarts=0, concurrency_groups={"control": 8, "generate": MAX_REQUESTS}
)(LLMServerShell)  # type: ignore[call-overload]
"""The shell as a Ray actor."""


class ReplicaClient:
    """Facade over a replica's Ray handle; picklable.

    `generate` and `partial` are coroutines; control calls block, with a deadline. Errors arrive as
    the replica raised them; the death of its process is an ActorUnavailableError.

    Example:
        >>> replica = start_replica(spec, run_id="r", attempt=1, name="replica-0")
        >>> replica.wait_ready(300.0)
        >>> replica.health()["state"]
        'ready'
    """

    def __init__(
        self,
        handle: Any,
        name: str,
        *,
        control_deadline_s: float = 150.0,
        load_deadline_s: float = 300.0,
    ) -> None:
        """Wrap `handle`; deadlines exceed the replica's own, whose messages say more."""
        self.handle = handle
        self.name = name
        self._control_deadline_s = control_deadline_s
        self._load_deadline_s = load_deadline_s

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        """Sample a response; cancelling the caller ends the request in the replica too.

        Raises:
            ActorUnavailableError: the replica died.
            RLCoreError: as LLMServer.generate.
        """
        return await self._await(
            self.handle.generate.remote(request_id, prompt_ids, sampling_params)
        )

    async def partial(self, request_id: str) -> TokenOutput | None:
        """Return what a request has sampled so far; None for an unknown one."""
        return await self._await(self.handle.partial.remote(request_id))

    def abort(self, key: CallKey) -> int:
        """End what runs and close the gate; return how many requests were ended."""
        return self._get(self.handle.abort.remote(key), "abort")

    def pause(self, key: CallKey, keep: bool, deadline_s: float | None = None) -> None:
        """Close the gate: freeze what runs (`keep`) or wait until it is finished."""
        self._get(self.handle.pause.remote(key, keep), "pause", deadline_s)

    def resume(self, key: CallKey) -> None:
        """Open the gate."""
        self._get(self.handle.resume.remote(key), "resume")

    def sleep(self, key: CallKey) -> None:
        """Free the memory of keys and values."""
        self._get(self.handle.sleep.remote(key), "sleep")

    def wake_up(self, key: CallKey) -> None:
        """Get the memory again."""
        self._get(self.handle.wake_up.remote(key), "wake_up")

    def prepare_weights(self, key: CallKey, version: int) -> None:
        """Close the gate for a weight update."""
        self._get(self.handle.prepare_weights.remote(key, version), "prepare_weights")

    def load_weights(self, key: CallKey, meta: WeightMeta) -> dict[str, Any]:
        """Load published weights; return version, num_bytes and checksum."""
        return self._get(
            self.handle.load_weights.remote(key, meta), "load_weights", self._load_deadline_s
        )

    def commit_weights(self, key: CallKey, version: int) -> None:
        """Serve the loaded weights."""
        self._get(self.handle.commit_weights.remote(key, version), "commit_weights")

    def abandon_weights(self, key: CallKey, version: int) -> None:
        """Give a weight update up."""
        self._get(self.handle.abandon_weights.remote(key, version), "abandon_weights")

    def health(self, deadline_s: float = 10.0) -> dict[str, Any]:
        """Return state and counters."""
        return self._get(self.handle.health.remote(), "health", deadline_s)

    def wait_ready(self, deadline_s: float) -> None:
        """Return when the engine is built."""
        self._get(self.handle.wait_ready.remote(deadline_s), "wait_ready", deadline_s + 30.0)

    def kill(self) -> None:
        """End the replica's process."""
        ray.kill(self.handle)

    async def _await(self, ref: Any) -> Any:
        try:
            return await ref
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise
        except RayTaskError as error:
            raise _original(error) from error
        except RayActorError as error:
            raise ActorUnavailableError(f"{self.name} died: {error}") from error

    def _get(self, ref: Any, what: str, deadline_s: float | None = None) -> Any:
        deadline_s = self._control_deadline_s if deadline_s is None else deadline_s
        try:
            return ray.get(ref, timeout=deadline_s)
        except GetTimeoutError:
            raise DeadlineExceededError(
                f"{self.name} did not answer {what} within {deadline_s:g} s"
            ) from None
        except RayTaskError as error:
            raise _original(error) from error
        except RayActorError as error:
            raise ActorUnavailableError(f"{self.name} died: {error}") from error


def start_replica(
    spec: EngineSpec, *, run_id: str, attempt: int, name: str, num_cpus: float = 1.0
) -> ReplicaClient:
    """Start a replica and return at once; `wait_ready` waits until its model is loaded."""
    handle = LLMServerActor.options(num_cpus=num_cpus).remote(spec, run_id, attempt, name)
    return ReplicaClient(handle, name)


def _original(error: RayTaskError) -> Exception:
    cause = error.cause
    return cause if isinstance(cause, RLCoreError) else error
