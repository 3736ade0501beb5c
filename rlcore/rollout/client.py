"""Generation as an agent loop sees it: one call per turn, whatever happens to replicas meanwhile.

A request that is aborted (weights change, a replica leaves) or whose replica dies keeps its tokens,
log-probs and weight versions here and goes on with the budget that is left.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcore.errors import ActorUnavailableError, ConfigError, RolloutError
from rlcore.rollout.pausable import PausableTimeout
from rlcore.rollout.router import ReplicaHandle, Router
from rlcore.types import TokenOutput

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0
FLUSH_TOKENS = 32
"""What a request loses at most or so when its replica dies."""
FLUSH_INTERVAL_S = 5.0
MIN_FLUSH_S = 0.5
"""However fast an engine is: thousands of requests that ask one replica cost it time, too."""
PACE_WEIGHT = 0.2
"""Of the newest request in the mean pace of requests."""
WATCH_INTERVAL_S = 0.1
"""How often the partial output of a request is fetched that somebody reads as it is sampled."""
MAX_WATCHES_PER_S = 100
"""Of all such requests of a process together: each costs its replica time."""

Watcher = Callable[[TokenOutput], None]
"""Is told of everything that a request has so far; after a replica's death it may be less."""


def sampling_seed(run_seed: int, identity: str, session_id: int, turn: int) -> int:
    """Return the seed of one turn: a uint64 that depends on the arguments only."""
    text = f"{run_seed}\n{identity}\n{session_id}\n{turn}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@dataclass(kw_only=True, slots=True)
class _Progress:
    """What one request has got so far."""

    token_ids: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    weight_versions: list[int] = field(default_factory=list[int])
    extra_fields: dict[str, Any] = field(default_factory=dict[str, Any])
    num_parts: int = 0

    def add(self, part: TokenOutput, replica: str) -> None:
        """Append a part.

        Raises:
            RolloutError: the replica broke the contract of one log-prob and version per token.
        """
        sizes = {len(part.token_ids), len(part.log_probs), len(part.weight_versions)}
        if len(sizes) != 1:
            raise RolloutError(
                f"replica {replica} returned {len(part.token_ids)} tokens, {len(part.log_probs)} "
                f"log-probs and {len(part.weight_versions)} weight versions"
            )
        self.token_ids += part.token_ids
        self.log_probs += part.log_probs
        self.weight_versions += part.weight_versions
        self.extra_fields.update(part.extra_fields)
        self.num_parts += 1

    def followed_by(self, part: TokenOutput) -> TokenOutput:
        """Return everything with a part that is not complete yet."""
        return TokenOutput(
            token_ids=self.token_ids + part.token_ids,
            log_probs=self.log_probs + part.log_probs,
            weight_versions=self.weight_versions + part.weight_versions,
            stop_reason="",
        )

    def output(self, stop_reason: str) -> TokenOutput:
        """Return everything as one output."""
        return TokenOutput(
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            weight_versions=self.weight_versions,
            stop_reason=stop_reason,
            extra_fields={**self.extra_fields, "num_parts": self.num_parts},
        )


class LLMServerClient:
    """Sends requests to replicas by way of a router (verl's name).

    Example:
        >>> client = LLMServerClient(Router({"replica-0": replica}), seed=0)
        >>> session = client.for_session("train/0/17", 3, max_tokens=16, max_model_len=80)
        >>> output = await session.generate("request", prompt_ids, {"temperature": 1.0})
    """

    def __init__(
        self, router: Router, seed: int, *, flush_interval_s: float | None = FLUSH_INTERVAL_S
    ) -> None:
        """Make a client.

        Args:
            router: The replicas that serve.
            seed: Seed of sampling of the run.
            flush_interval_s: How often at least the partial output of a running request is
                fetched, which is what survives its replica; every FLUSH_TOKENS tokens, where these
                come sooner. None: never, a request is made anew elsewhere.
        """
        self.router = router
        self.seed = seed
        self.tokens_generated = 0
        self._flush_interval_s = flush_interval_s
        self._token_s = (flush_interval_s or 0.0) / FLUSH_TOKENS
        self._num_watched = 0

    def for_session(
        self,
        identity: str,
        session_id: int,
        *,
        max_tokens: int,
        max_model_len: int,
        deadline: PausableTimeout | None = None,
    ) -> "SessionClient":
        """Return the client that one session's agent loop gets.

        Args:
            identity: Names the prompt within the run: the same in a repeat of the run, so that it
                holds no run id. Routes all sessions of a group to one replica.
            session_id: Which attempt at the prompt.
            max_tokens: Budget of a turn at most.
            max_model_len: Tokens of prompt and response at most.
            deadline: Of the session, which is not charged while no replica serves.
        """
        return SessionClient(
            self,
            identity,
            session_id,
            max_tokens=max_tokens,
            max_model_len=max_model_len,
            deadline=deadline,
        )

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        *,
        routing_key: str | None = None,
        deadline: PausableTimeout | None = None,
        on_partial: Watcher | None = None,
    ) -> TokenOutput:
        """Sample a response to `prompt_ids`.

        Args:
            request_id: Names the request in messages; seeds it when `sampling_params` has no seed.
            prompt_ids: Everything the model has read and written before.
            sampling_params: temperature, do_sample, max_tokens, stop_token_ids, seed, ...
            routing_key: Requests with the same one go to one replica; default `request_id`.
            deadline: Round this call; stands still while no replica serves.
            on_partial: Called several times a second while the request runs.

        Raises:
            NoReplicaError: no replica serves.
            RolloutError: a replica broke the contract.
        """
        watch = None if on_partial is None else lambda p: on_partial(progress.followed_by(p))
        budget = int(sampling_params["max_tokens"])
        params = {**sampling_params}
        params.setdefault("seed", sampling_seed(self.seed, request_id, 0, 0))
        progress = _Progress()
        backoff_s = FIRST_BACKOFF_S
        while len(progress.token_ids) < budget:
            params["max_tokens"] = budget - len(progress.token_ids)
            params["position"] = len(progress.token_ids)
            part_id = f"{request_id}-{progress.num_parts}"
            async with self.router.acquire(routing_key or request_id, deadline) as (name, replica):
                part = await self._generate_part(
                    name, replica, part_id, [*prompt_ids, *progress.token_ids], params, watch
                )
            progress.add(part, name)
            self.tokens_generated += len(part.token_ids)
            if part.stop_reason != "aborted":
                return progress.output(part.stop_reason)
            # A replica that is about to be paused may abort again at once: do not spin.
            backoff_s = FIRST_BACKOFF_S if part.token_ids else min(2 * backoff_s, MAX_BACKOFF_S)
            await asyncio.sleep(backoff_s)
        return progress.output("length")

    async def _generate_part(
        self,
        name: str,
        replica: ReplicaHandle,
        request_id: str,
        prompt_ids: list[int],
        params: dict[str, Any],
        watch: Watcher | None,
    ) -> TokenOutput:
        """Return what one replica gave: to the end, to its abort or to its death."""
        held = TokenOutput(token_ids=[], log_probs=[], weight_versions=[], stop_reason="aborted")
        running = asyncio.ensure_future(replica.generate(request_id, prompt_ids, dict(params)))
        began = time.monotonic()
        self._num_watched += watch is not None
        try:
            while True:
                wait_s = self._next_flush_s() if watch is None else self._next_watch_s()
                done, _ = await asyncio.wait({running}, timeout=wait_s)
                seen = running.result() if done else await replica.partial(request_id)
                if seen is not None and (done or self._flush_interval_s is not None):
                    # Without a flush interval a request is made anew, whatever was shown of it.
                    held = seen
                self._learn(len(held.token_ids), time.monotonic() - began)
                if done:
                    return held
                if seen is not None and watch is not None:
                    watch(seen)
        except ActorUnavailableError as error:
            self.router.remove(name, replica)
            logger.warning(
                "replica %s died during request %s; %d tokens are kept and the request goes on "
                "elsewhere: %s",
                name, request_id, len(held.token_ids), error,
            )  # fmt: skip
            held.stop_reason = "aborted"
            return held
        finally:
            self._num_watched -= watch is not None
            running.cancel()

    def _next_watch_s(self) -> float:
        """Return how long a request that is watched is left alone."""
        return max(WATCH_INTERVAL_S, self._num_watched / MAX_WATCHES_PER_S)

    def _next_flush_s(self) -> float | None:
        """Return how long a request takes for FLUSH_TOKENS, by the pace of requests lately."""
        if self._flush_interval_s is None:
            return None
        return min(self._flush_interval_s, max(MIN_FLUSH_S, FLUSH_TOKENS * self._token_s))

    def _learn(self, num_tokens: int, seconds: float) -> None:
        """Move the pace towards that of one request; one that waits for its turn has none."""
        if num_tokens == 0 or self._flush_interval_s is None:
            return
        slowest = self._flush_interval_s / FLUSH_TOKENS
        self._token_s += PACE_WEIGHT * (min(slowest, seconds / num_tokens) - self._token_s)


class SessionClient:
    """What an agent loop gets as `server_manager`: seeds and budgets each turn of one session."""

    def __init__(
        self,
        client: LLMServerClient,
        identity: str,
        session_id: int,
        *,
        max_tokens: int,
        max_model_len: int,
        deadline: PausableTimeout | None = None,
    ) -> None:
        self._client = client
        self._deadline = deadline
        self._identity = identity
        self._session_id = session_id
        self._max_tokens = max_tokens
        self._max_model_len = max_model_len
        self.num_turns = 0
        """Turns begun."""
        self.turns: list[TokenOutput] = []
        """Finished turns, in the order in which they ended."""

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        *,
        on_partial: Watcher | None = None,
        **media: Any,
    ) -> TokenOutput:
        """Sample one turn.

        The seed follows from the run's seed, prompt, session and turn; `request_id` (verl's loops
        draw a random one) only names the request. A turn without `max_tokens` may fill the
        response, and no turn exceeds prompt plus response length. `on_partial` is told of the
        tokens as they are sampled. `media` is verl's image_data and the like, which must be None.

        Raises:
            ConfigError: media were given.
            NoReplicaError: no replica serves.
            RolloutError: a replica broke the contract.
        """
        given = sorted(name for name, value in media.items() if value is not None)
        if given:
            raise ConfigError(f"{', '.join(given)}: only text models are served")
        turn = self.num_turns
        self.num_turns += 1
        room = self._max_model_len - len(prompt_ids)
        wanted = int(sampling_params.get("max_tokens") or self._max_tokens)
        budget = max(0, min(wanted, self._max_tokens, room))
        seed = sampling_seed(self._client.seed, self._identity, self._session_id, turn)
        output = await self._client.generate(
            f"{self._identity}-{self._session_id}-{turn}-{request_id}",
            prompt_ids,
            {**sampling_params, "max_tokens": budget, "seed": seed},
            routing_key=self._identity,
            deadline=self._deadline,
            on_partial=on_partial,
        )
        self.turns.append(output)
        return output
