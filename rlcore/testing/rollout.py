"""In-process stand-ins for what an AgentLoopWorker talks to: replica, ledger, queue."""

import asyncio
import hashlib
import threading
from collections.abc import Sequence
from typing import Any

from rlcore.agent_loop.rows import Row
from rlcore.buffer.ledger import Ledger
from rlcore.errors import ActorUnavailableError
from rlcore.types import PromptSpec, SessionRecord, TokenOutput


class CountingReplica:
    """A replica whose token at a position depends on (seed, position) only, as the engine's does.

    Attributes:
        requests: Every call: (request_id, number of prompt tokens, sampling parameters).
        version: Weight version of the tokens from now on.
    """

    def __init__(
        self,
        *,
        num_tokens: int | None = None,
        first_token: int = 60,
        num_choices: int = 26,
        version: int = 0,
        aborts: Sequence[int] = (),
        dies_after: int | None = None,
        delay_s: float = 0.0,
    ) -> None:
        """Make a replica.

        Args:
            num_tokens: Length of every response, whose last token is a stop token; None runs into
                `max_tokens`.
            first_token: Least token id it samples.
            num_choices: How many ids it samples from.
            version: Weight version.
            aborts: Call k is aborted after this many tokens.
            dies_after: The first call makes this many tokens, then the replica dies for good.
            delay_s: Duration of a call.
        """
        self.requests: list[tuple[str, int, dict[str, Any]]] = []
        self.version = version
        self._num_tokens = num_tokens
        self._first_token = first_token
        self._num_choices = num_choices
        self._aborts = list(aborts)
        self._dies_after = dies_after
        self._delay_s = delay_s
        self._partial: dict[str, TokenOutput] = {}
        self._num_running = 0

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        """Return what was scripted."""
        self.requests.append((request_id, len(prompt_ids), dict(sampling_params)))
        self._num_running += 1
        try:
            return await self._respond(request_id, sampling_params)
        finally:
            self._num_running -= 1

    async def num_running(self) -> int:
        """Return how many calls are under way."""
        return self._num_running

    async def _respond(self, request_id: str, sampling_params: dict[str, Any]) -> TokenOutput:
        if self._dies_after is not None:
            self._partial[request_id] = self._output(sampling_params, self._dies_after, "aborted")
            await asyncio.sleep(self._delay_s)
            raise ActorUnavailableError("the replica was killed by the test")
        await asyncio.sleep(self._delay_s)
        if self._aborts:
            return self._output(sampling_params, self._aborts.pop(0), "aborted")
        position = sampling_params["position"]
        budget = sampling_params["max_tokens"]
        if self._num_tokens is None or self._num_tokens - position > budget:
            return self._output(sampling_params, budget, "length")
        output = self._output(sampling_params, self._num_tokens - position, "completed")
        output.token_ids[-1] = sampling_params["stop_token_ids"][0]
        return output

    async def partial(self, request_id: str) -> TokenOutput | None:
        """Return what a dying call has made."""
        return self._partial.get(request_id)

    def _output(self, params: dict[str, Any], count: int, stop_reason: str) -> TokenOutput:
        first = params["position"]
        tokens = [self.token_at(params["seed"], p) for p in range(first, first + count)]
        return TokenOutput(
            token_ids=tokens,
            log_probs=[-float(token) / 100 for token in tokens],
            weight_versions=[self.version] * count,
            stop_reason=stop_reason,
        )

    def token_at(self, seed: int, position: int) -> int:
        """Return the token that every replica of this kind samples at a position."""
        digest = hashlib.sha256(f"{seed} {position}".encode()).digest()
        return self._first_token + digest[0] % self._num_choices


class LocalLedger:
    """A real ledger for one worker in the same process."""

    def __init__(self, ledger: Ledger, attempt: int = 1) -> None:
        self.ledger = ledger
        self.renewed: list[list[str]] = []
        self._attempt = attempt
        # The ledger is not thread-safe, and leases are renewed from a thread.
        self._lock = threading.Lock()

    async def claim(self, worker_id: str, limit: int, wait_s: float) -> list[PromptSpec]:
        """Claim; an empty answer comes after a moment, not after the whole wait."""
        with self._lock:
            specs = self.ledger.claim(self._attempt, worker_id, limit)
        if not specs:
            await asyncio.sleep(min(wait_s, 0.01))
        return specs

    def renew(self, worker_id: str, uids: Sequence[str]) -> list[str]:
        """Renew, and keep what was asked for."""
        self.renewed.append(list(uids))
        with self._lock:
            return self.ledger.renew(worker_id, uids)

    async def settle(self, worker_id: str, uid: str, sessions: Sequence[SessionRecord]) -> None:
        """Settle a group."""
        with self._lock:
            self.ledger.settle(worker_id, uid, sessions)

    async def release_worker(self, worker_id: str) -> None:
        """Return the worker's prompts to pending."""
        with self._lock:
            self.ledger.release_worker(worker_id)


class MemoryQueue:
    """Rows in a dict.

    Attributes:
        rows: (partition, key) to row.
        batch_sizes: Rows of each put.
    """

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Row] = {}
        self.tags: dict[tuple[str, str], dict[str, Any]] = {}
        self.batch_sizes: list[int] = []
        self.is_dead = False

    async def put_rows(
        self,
        partition_id: str,
        keys: Sequence[str],
        rows: Sequence[Row],
        tags: Sequence[dict[str, Any]],
    ) -> None:
        """Store rows.

        Raises:
            ActorUnavailableError: `is_dead` is set.
        """
        await asyncio.sleep(0)
        if self.is_dead:
            raise ActorUnavailableError("the queue host was killed by the test")
        self.batch_sizes.append(len(keys))
        for key, row, tag in zip(keys, rows, tags, strict=True):
            self.rows[partition_id, key] = row
            self.tags[partition_id, key] = tag


class MemoryQueueHost(MemoryQueue):
    """The same with the queue host's signatures, for `ray.remote`."""

    async def put_rows(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        caller: int,
        partition_id: str,
        keys: Sequence[str],
        rows: Sequence[Row],
        tags: Sequence[dict[str, Any]],
    ) -> None:
        """Store rows for the attempt `caller`."""
        await super().put_rows(partition_id, keys, rows, tags)

    async def stored(self) -> dict[tuple[str, str], Row]:
        """Return all rows."""
        return self.rows
