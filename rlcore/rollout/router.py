"""Which replica serves a request: sticky with a load cap, else the one with least in flight."""

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Any, Protocol

from rlcore.errors import NoReplicaError
from rlcore.rollout.pausable import PausableTimeout
from rlcore.types import TokenOutput

logger = logging.getLogger(__name__)

STICKY_SIZE = 10_000


class ReplicaHandle(Protocol):
    """What the client needs of a replica; rlcore/cluster wraps Ray handles into it.

    A call raises ActorUnavailableError when the replica's process died or does not answer. Two that
    reach the same process are equal.
    """

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        """Sample a response."""
        ...

    async def partial(self, request_id: str) -> TokenOutput | None:
        """Return what was sampled so far for a request that runs, None for an unknown one."""
        ...


class Router:
    """The replicas that serve, and what each has in flight from this process.

    A session's requests go to one replica, for its prefix cache, unless that one has more than
    `load_cap` requests beyond the least loaded. With `full_determinism` the replica is a fixed
    function of the routing key and of the names in the pool.
    """

    def __init__(
        self,
        replicas: Mapping[str, ReplicaHandle],
        *,
        full_determinism: bool = False,
        load_cap: int = 16,
        empty_deadline_s: float = 300.0,
    ) -> None:
        """Make a router.

        Args:
            replicas: Name to handle; names order ties and are what messages say.
            full_determinism: Choose by the routing key alone.
            load_cap: Requests by which a sticky replica may exceed the least loaded one.
            empty_deadline_s: How long a request waits while no replica serves.
        """
        self._replicas: dict[str, ReplicaHandle] = dict(replicas)
        self._in_flight: dict[str, int] = dict.fromkeys(replicas, 0)
        self._generation: dict[str, int] = dict.fromkeys(replicas, 0)
        self._sticky: OrderedDict[str, str] = OrderedDict()
        self._full_determinism = full_determinism
        self._load_cap = load_cap
        self._empty_deadline_s = empty_deadline_s
        self._joined = asyncio.Event()

    @property
    def names(self) -> list[str]:
        """Names of the replicas that serve, sorted."""
        return sorted(self._replicas)

    @property
    def in_flight(self) -> dict[str, int]:
        """Requests of this process per replica."""
        return {name: self._in_flight[name] for name in self.names}

    def add(self, name: str, replica: ReplicaHandle) -> None:
        """Let a replica serve; one of the same name is replaced and starts with nothing in flight.

        Late ends of requests to the replaced one do not count against the new one.
        """
        self._replicas[name] = replica
        self._in_flight[name] = 0
        self._generation[name] = self._generation.get(name, -1) + 1
        self._joined.set()
        self._joined = asyncio.Event()

    def remove(self, name: str, replica: ReplicaHandle | None = None) -> None:
        """Send no more requests to a replica; those in flight go on.

        Args:
            name: Which one; an unknown name is fine.
            replica: Remove it only if it is still this one: a report about a dead replica must not
                remove the one that took its place.
        """
        if replica is not None and self._replicas.get(name) is not replica:
            return
        self._replicas.pop(name, None)

    def replace_all(self, replicas: Mapping[str, ReplicaHandle]) -> None:
        """Let exactly these replicas serve; one that serves already keeps what it has in flight."""
        for name in set(self._replicas) - set(replicas):
            self.remove(name)
        for name, replica in replicas.items():
            if self._replicas.get(name) != replica:
                self.add(name, replica)

    @asynccontextmanager
    async def acquire(
        self, routing_key: str, deadline: PausableTimeout | None = None
    ) -> AsyncIterator[tuple[str, ReplicaHandle]]:
        """Yield name and handle of the replica for a request, counted while the block runs.

        Args:
            routing_key: The same for all requests of a session.
            deadline: Of the session; stands still while no replica serves.

        Raises:
            NoReplicaError: no replica served for `empty_deadline_s`.
        """
        if not self._replicas:
            with nullcontext() if deadline is None else deadline.paused():
                await self._wait_for_any(routing_key)
        name = self._choose(routing_key)
        generation = self._generation[name]
        self._in_flight[name] += 1
        try:
            yield name, self._replicas[name]
        finally:
            if self._generation[name] == generation:
                self._in_flight[name] -= 1

    async def _wait_for_any(self, routing_key: str) -> None:
        try:
            async with asyncio.timeout(self._empty_deadline_s):
                while not self._replicas:
                    await self._joined.wait()
        except TimeoutError:
            raise NoReplicaError(
                f"request {routing_key} waited {self._empty_deadline_s:g} s for a replica: none "
                f"serves; known so far: {', '.join(sorted(self._generation)) or 'none'}"
            ) from None

    def _choose(self, routing_key: str) -> str:
        if self._full_determinism:
            digest = hashlib.sha256(routing_key.encode()).digest()
            return self.names[int.from_bytes(digest[:8], "big") % len(self._replicas)]
        least = min(self.names, key=lambda name: self._in_flight[name])
        sticky = self._sticky.get(routing_key)
        if sticky in self._replicas and (
            self._in_flight[sticky] - self._in_flight[least] <= self._load_cap
        ):
            self._sticky.move_to_end(routing_key)
            return sticky
        self._sticky[routing_key] = least
        self._sticky.move_to_end(routing_key)
        if len(self._sticky) > STICKY_SIZE:
            self._sticky.popitem(last=False)
        return least
