"""Replicas as Ray actors, and the client that everybody else holds.

The actor is a thin shell round `rlcore.rollout.server.LLMServer`. Generation and control have
concurrency groups of their own: a control call is never queued behind thousands of requests.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from rlcore.cluster.calls import kill_actor, wait_for_reply
from rlcore.cluster.log_stream import LogAddress, connect_log_stream
from rlcore.cluster.process_name import ProcessName
from rlcore.cluster.ray_replica import RayReplica
from rlcore.cluster.worker_environment import compute_on
from rlcore.config import RunConfig
from rlcore.config.cores import Cores, replica_name
from rlcore.rollout.engine import Engine, EngineSpec, build_engine
from rlcore.rollout.server import LLMServer, ServerDeadlines
from rlcore.types import CallKey, TokenOutput, WeightMeta
from rlcore.user_code import load_user_modules

logger = logging.getLogger(__name__)

MAX_REQUESTS = 4096
"""Requests that one replica holds at a time; more wait in Ray."""

OBEYS_S = 1.0
"""A replica that Ray has told to end first ends its engine's processes; Ray tells of a crash where
it is killed meanwhile."""

REPLY_S = 30.0
"""What a client waits beyond the replica's own deadline, whose message says more."""


@ray.remote(  # pyright: ignore[reportCallIssue] (Ray's stubs know no concurrency_groups)
    num_cpus=0,
    max_restarts=0,
    max_task_retries=0,
    concurrency_groups={"control": 8, "generate": MAX_REQUESTS},
)
class LLMServerActor:
    """One replica in a process of its own; see LLMServer for what the methods do."""

    def __init__(
        self,
        spec: EngineSpec,
        *,
        run_id: str,
        attempt: int,
        name: str,
        deadlines: ServerDeadlines,
        user_modules: Sequence[str] = (),
        log_address: LogAddress | None = None,
    ) -> None:
        if log_address is not None:
            connect_log_stream(log_address, name)

        def make_engine() -> Engine:
            # Here, not above: what a constructor raises reaches the driver as a dead actor only.
            # In the engine's thread, whose torch threads are those that compute.
            compute_on(spec.cores)
            load_user_modules(user_modules)
            return build_engine(spec)

        self._server = LLMServer(
            make_engine, run_id=run_id, attempt=attempt, name=name, deadlines=deadlines
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
    async def give_up(self, key: CallKey) -> None:
        """Refuse a try of a phase from now on."""
        await self._server.give_up(key)

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
    async def committed_weights(self) -> WeightMeta | None:
        """Return what was committed last."""
        return await self._server.committed_weights()

    @ray.method(concurrency_group="control")
    async def health(self) -> dict[str, Any]:
        """Return state and counters."""
        return await self._server.health()

    @ray.method(concurrency_group="control")
    async def wait_ready(self, deadline_s: float) -> None:
        """Return when the engine is built."""
        await self._server.wait_ready(deadline_s)

    @ray.method(concurrency_group="control")
    async def process(self) -> ProcessName:
        """Say which process this is."""
        return ProcessName.of_this()

    @ray.method(concurrency_group="control")
    async def close(self) -> None:
        """End the engine thread."""
        await self._server.close()


class ReplicaClient(RayReplica):
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
        deadlines: ServerDeadlines,
    ) -> None:
        """Wrap `handle`; calls may take REPLY_S more than the replica's own deadlines."""
        super().__init__(handle, name)
        self.process: ProcessName | None = None
        self._control_deadline_s = deadlines.control_s + REPLY_S
        self._load_deadline_s = deadlines.load_s + REPLY_S
        self._drain_deadline_s = deadlines.control_s + deadlines.request_s + REPLY_S

    def abort(self, key: CallKey) -> int:
        """End what runs and close the gate; return how many requests were ended."""
        return self._get(self.handle.abort.remote(key), "abort")

    def pause(self, key: CallKey, keep: bool) -> None:
        """Close the gate: freeze what runs (`keep`) or wait until it is finished."""
        deadline_s = self._control_deadline_s if keep else self._drain_deadline_s
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

    def committed_weights(self) -> WeightMeta | None:
        """Return what was committed last; None: the weights of the model folder are served."""
        return self._get(self.handle.committed_weights.remote(), "committed_weights")

    def health(self, deadline_s: float = 10.0) -> dict[str, Any]:
        """Return state and counters."""
        return self._get(self.handle.health.remote(), "health", deadline_s)

    def wait_ready(self, deadline_s: float) -> None:
        """Return when the engine is built."""
        self._get(self.handle.wait_ready.remote(deadline_s), "wait_ready", deadline_s + REPLY_S)
        self.process = self._get(self.handle.process.remote(), "process")

    def kill(self) -> None:
        """End the replica's process, also one that is stopped and so does not obey Ray."""
        kill_actor(self.handle)
        if self.process is not None:
            self.process.kill(patience_s=OBEYS_S)

    def _get(self, reply: Any, what: str, deadline_s: float | None = None) -> Any:
        deadline_s = self._control_deadline_s if deadline_s is None else deadline_s
        return wait_for_reply(reply, what=f"{self.name}.{what}", deadline_s=deadline_s)


def start_replica(
    spec: EngineSpec,
    *,
    run_id: str,
    attempt: int,
    name: str,
    deadlines: ServerDeadlines | None = None,
    user_modules: Sequence[str] = (),
    log_address: LogAddress | None = None,
) -> ReplicaClient:
    """Start a replica and return at once; `wait_ready` waits until its model is loaded.

    Args:
        spec: its engine.
        run_id: whose calls it admits.
        attempt: fencing token.
        name: in messages, and as the source of its log records.
        deadlines: of its waits, and of the calls of the returned client.
        user_modules: files that register things, e.g. an engine.
        log_address: where its log records go.
    """
    deadlines = deadlines or ServerDeadlines()
    handle: ActorHandle = LLMServerActor.remote(  # pyright: ignore[reportAttributeAccessIssue]
        spec,
        run_id=run_id,
        attempt=attempt,
        name=name,
        deadlines=deadlines,
        user_modules=list(user_modules),
        log_address=log_address,
    )
    return ReplicaClient(handle, name, deadlines=deadlines)


def replica_starter(
    config: RunConfig,
    *,
    run_id: str,
    attempt: int,
    cores: Mapping[str, Cores] | None = None,
    log_address: LogAddress | None = None,
) -> Callable[[str], ReplicaClient]:
    """Return what starts a replica of the run by its name, and does not wait for its model.

    Args:
        config: Of the run.
        run_id: Whose calls they admit.
        attempt: Fencing token.
        cores: By name, what each computes on; those without an entry: on all.
        log_address: Where their log records go.
    """
    return functools.partial(
        _start_named,
        config,
        cores or {},
        run_id=run_id,
        attempt=attempt,
        deadlines=ServerDeadlines.from_config(config),
        user_modules=config.user_modules,
        log_address=log_address,
    )


def _start_named(
    config: RunConfig, cores: Mapping[str, Cores], name: str, **options: Any
) -> ReplicaClient:
    spec = EngineSpec.from_config(config, cores.get(name, ()))
    return start_replica(spec, name=name, **options)


def start_replicas(
    config: RunConfig,
    start: Callable[[str], ReplicaClient],
    on_created: Callable[[str, ReplicaClient], None] | None = None,
) -> dict[str, ReplicaClient]:
    """Start the replicas of a run side by side and wait until all are ready.

    Args:
        config: Of the run.
        start: See `replica_starter`.
        on_created: Gets name and replica before its model is loaded, to be able to end it
            meanwhile.

    Raises:
        ConfigError: the engine cannot run the model.
        DeadlineExceededError: one is not ready within `deadlines.start`.
        ActorUnavailableError: one died while it started.
    """
    names = [replica_name(i) for i in range(config.actor_rollout_ref.rollout.num_replicas)]
    replicas: dict[str, ReplicaClient] = {}
    try:
        for name in names:
            replicas[name] = start(name)
            if on_created is not None:
                on_created(name, replicas[name])
        for replica in replicas.values():
            replica.wait_ready(config.deadlines.start)
    except BaseException:
        for replica in replicas.values():
            replica.kill()
        raise
    logger.info("%d replicas are ready: %s", len(replicas), EngineSpec.from_config(config))
    return replicas
