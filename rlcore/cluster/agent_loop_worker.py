"""AgentLoopWorker as a Ray actor, and the driver's handle on it. The process imports no torch."""

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Self

import ray
from ray.actor import ActorHandle

from rlcore.agent_loop.rows import Row
from rlcore.agent_loop.worker import AgentLoopWorker, WorkerStatus
from rlcore.cluster.calls import await_reply, kill_actor, wait_for_reply
from rlcore.cluster.log_stream import LogAddress, connect_log_stream
from rlcore.cluster.ray_replica import RayReplica
from rlcore.config import RunConfig
from rlcore.data.tokenizer import load_tokenizer
from rlcore.errors import ActorUnavailableError, RolloutError, TransientError
from rlcore.reward.loop import RewardLoopManager
from rlcore.rollout.client import FLUSH_INTERVAL_S, LLMServerClient
from rlcore.rollout.router import Router
from rlcore.types import PromptSpec, SessionRecord
from rlcore.user_code import load_user_modules

logger = logging.getLogger(__name__)


class RayWorkerLedger:
    """The ledger actor as a worker needs it."""

    def __init__(self, handle: ActorHandle, attempt: int, deadline_s: float) -> None:
        self._handle = handle
        self._attempt = attempt
        self._deadline_s = deadline_s

    async def claim(self, worker_id: str, limit: int, wait_s: float) -> list[PromptSpec]:
        """See LedgerActor.claim."""
        reply = self._handle.claim.remote(self._attempt, worker_id, limit, wait_s)
        return await await_reply(reply, what="ledger.claim", deadline_s=self._deadline_s + wait_s)

    def renew(self, worker_id: str, uids: Sequence[str]) -> list[str]:
        """See Ledger.renew; called from the thread that renews leases."""
        reply = self._handle.renew.remote(worker_id, list(uids))
        return wait_for_reply(reply, what="ledger.renew", deadline_s=self._deadline_s)

    async def settle(self, worker_id: str, uid: str, sessions: Sequence[SessionRecord]) -> None:
        """See Ledger.settle."""
        reply = self._handle.settle.remote(worker_id, uid, list(sessions))
        await await_reply(reply, what="ledger.settle", deadline_s=self._deadline_s)

    async def release_worker(self, worker_id: str) -> None:
        """See Ledger.release_worker."""
        reply = self._handle.release_worker.remote(worker_id)
        await await_reply(reply, what="ledger.release_worker", deadline_s=self._deadline_s)


class RayWorkerQueue:
    """The queue host as a worker needs it."""

    def __init__(self, handle: ActorHandle, attempt: int, deadline_s: float) -> None:
        self._handle = handle
        self._attempt = attempt
        self._deadline_s = deadline_s

    async def put_rows(
        self,
        partition_id: str,
        keys: Sequence[str],
        rows: Sequence[Row],
        tags: Sequence[dict[str, Any]],
    ) -> None:
        """See QueueHost.put_rows."""
        reply = self._handle.put_rows.remote(
            self._attempt, partition_id, list(keys), list(rows), list(tags)
        )
        await await_reply(reply, what="queue host.put_rows", deadline_s=self._deadline_s)


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class AgentLoopWorkerActor:
    """One worker; its event loop runs sessions and answers the supervisor."""

    def __init__(
        self,
        config: RunConfig,
        worker_id: str,
        attempt: int,
        ledger: ActorHandle,
        queue_host: ActorHandle,
        replicas: Mapping[str, ActorHandle],
        reward_address: str | None,
        log_address: LogAddress | None,
    ) -> None:
        if log_address is not None:
            connect_log_stream(log_address, worker_id)
        deadline_s = config.deadlines.queue
        self._config = config
        self._worker_id = worker_id
        self._reward_address = reward_address
        self._ledger = RayWorkerLedger(ledger, attempt, deadline_s)
        self._queue = RayWorkerQueue(queue_host, attempt, deadline_s)
        self._is_deterministic = config.actor_rollout_ref.rollout.full_determinism
        self._router = Router(
            _wrap(replicas),
            full_determinism=self._is_deterministic,
            empty_deadline_s=config.deadlines.start,
        )
        self._worker: AgentLoopWorker | None = None
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the user's code and begin to claim prompts.

        Not in the constructor: Ray reports what that raises as the death of the actor, by which a
        mistake in the user's code would look like a fault that a retry may cure.

        Raises:
            ConfigError: a user's module or function, a tool or the tokenizer cannot be loaded.
        """
        if self._running is not None:
            return
        # Without the module of a weight backend, which would bring torch along.
        load_user_modules(self._config.trainer.user_modules)
        model = self._config.actor_rollout_ref.model
        self._worker = AgentLoopWorker(
            self._config,
            self._worker_id,
            ledger=self._ledger,
            queue=self._queue,
            client=LLMServerClient(
                self._router,
                self._config.rollout_seed,
                # The keys of a half are prefilled, which may round otherwise than decoding.
                flush_interval_s=None if self._is_deterministic else FLUSH_INTERVAL_S,
            ),
            tokenizer=load_tokenizer(model.path, model.trust_remote_code),
            rewards=None
            if self._config.scores_later
            else RewardLoopManager(self._config, self._reward_address),
        )
        await self._worker.prepare()
        self._running = asyncio.create_task(self._worker.run_forever())

    async def status(self) -> WorkerStatus:
        """Return what the worker has done; raises what ended it."""
        if self._running is not None and self._running.done():
            self._running.result()
        return self._started().status()

    async def set_replicas(self, replicas: Mapping[str, ActorHandle]) -> None:
        """Let exactly these replicas serve; requests in flight elsewhere go on."""
        self._router.replace_all(_wrap(replicas))

    async def stop(self, drain_s: float) -> dict[str, float]:
        """Claim no more, let prompts end for up to `drain_s`; return the totals."""
        self._started().stop(drain_s)
        if self._running is not None:
            await self._running
        return self._started().status().counters()

    def _started(self) -> AgentLoopWorker:
        if self._worker is None:
            raise RolloutError(f"{self._worker_id} was not started: call start() first")
        return self._worker


class AgentLoopWorkerHandle:
    """The driver's handle on one worker; calls are awaited on the driver's loop.

    A worker whose process died, whose collaborators are not there, or that does not answer raises
    ActorUnavailableError: kill it, release its leases, start another.
    """

    def __init__(self, worker_id: str, actor: Any) -> None:
        self.worker_id = worker_id
        self._actor = actor

    @classmethod
    def create(
        cls,
        config: RunConfig,
        index: int,
        *,
        attempt: int,
        ledger: ActorHandle,
        queue_host: ActorHandle,
        replicas: Mapping[str, ActorHandle],
        reward_address: str | None = None,
        log_address: LogAddress | None = None,
    ) -> Self:
        """Create the actor without waiting for it; `ready` does.

        Args:
            config: Of the run.
            index: Number of the producer.
            attempt: Fencing token.
            ledger: The ledger actor.
            queue_host: The queue host actor.
            replicas: Name to LLM server actor.
            reward_address: Where the reward model is asked.
            log_address: Where its log records go.
        """
        # A new id for each incarnation: leases of a dead one are not taken for this one's.
        worker_id = f"agent-loop-worker-{index}-{attempt}-{secrets.token_hex(3)}"
        actor = AgentLoopWorkerActor.remote(
            config,
            worker_id,
            attempt,
            ledger,
            queue_host,
            dict(replicas),
            reward_address,
            log_address,
        )
        return cls(worker_id, actor)

    async def ready(self, deadline_s: float) -> None:
        """Wait until the worker claims prompts."""
        await self._call("start", deadline_s=deadline_s)

    async def status(self, deadline_s: float) -> WorkerStatus:
        """Return what the worker has done."""
        return await self._call("status", deadline_s=deadline_s)

    async def set_replicas(self, replicas: Mapping[str, ActorHandle], deadline_s: float) -> None:
        """Let exactly these replicas serve."""
        await self._call("set_replicas", dict(replicas), deadline_s=deadline_s)

    async def stop(self, deadline_s: float) -> dict[str, float]:
        """End the worker after its running prompts, within `deadline_s`; return the totals."""
        return await self._call("stop", deadline_s / 2, deadline_s=deadline_s)

    def kill(self) -> None:
        """Kill the process; one that is dead already is fine."""
        kill_actor(self._actor)

    async def _call(self, method: str, *args: Any, deadline_s: float) -> Any:
        what = f"{self.worker_id}.{method}"
        reply = getattr(self._actor, method).remote(*args)
        try:
            return await await_reply(reply, what=what, deadline_s=deadline_s)
        except ActorUnavailableError:
            raise
        except TransientError as error:
            raise ActorUnavailableError(f"{what}: {error}") from error


def _wrap(replicas: Mapping[str, ActorHandle]) -> dict[str, RayReplica]:
    return {name: RayReplica(handle, name) for name, handle in replicas.items()}
