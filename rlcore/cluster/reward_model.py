"""The reward model's LLM servers, and the actor through which reward functions ask them.

    scoring process --HTTP--> router actor (RewardModelServer, router, client) --> replicas

The replicas are those of the policy's kind with a spec of their own; nobody updates their weights.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.actor import ActorHandle

from rlcore.cluster.calls import kill_actor, wait_for_reply
from rlcore.cluster.executor_slots import reachable_host
from rlcore.cluster.llm_server import ReplicaClient, start_replica
from rlcore.cluster.log_stream import LogAddress, connect_log_stream
from rlcore.cluster.ray_replica import RayReplica
from rlcore.config import RunConfig
from rlcore.data.tokenizer import load_tokenizer, stop_token_ids
from rlcore.reward.model import is_discriminative
from rlcore.reward.model_server import RewardModelServer
from rlcore.rollout.client import LLMServerClient
from rlcore.rollout.engine import EngineSpec
from rlcore.rollout.router import Router
from rlcore.rollout.server import ServerDeadlines
from rlcore.types import CallKey

logger = logging.getLogger(__name__)

NAME = "reward-model"
EMPTY_S = 5.0
"""How long a request waits where no replica is left: none comes back within an attempt."""


def reward_model_spec(config: RunConfig) -> EngineSpec:
    """Return what the reward model's engines are built from."""
    model = config.reward.reward_model
    return EngineSpec(
        name=model.rollout.name,
        model_path=model.model_path or "",
        dtype=model.rollout.dtype,
        max_num_seqs=model.rollout.max_num_seqs,
        max_model_len=model.rollout.prompt_length + model.rollout.response_length,
        num_threads=config.num_threads,
        trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
        task="classify" if is_discriminative(config) else "generate",
    )


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class RewardRouterActor:
    """Answers HTTP requests by way of the replicas."""

    def __init__(self, config: RunConfig, log_address: LogAddress | None) -> None:
        if log_address is not None:
            connect_log_stream(log_address, NAME)
        self._config = config
        self._server: RewardModelServer | None = None

    async def start(self, replicas: Mapping[str, ActorHandle], host: str) -> str:
        """Open the port; return `host:port`.

        Raises:
            ConfigError: the model folder has no tokenizer or chat template.
        """
        model = self._config.reward.reward_model
        path = model.model_path or ""
        tokenizer = load_tokenizer(path, self._config.actor_rollout_ref.model.trust_remote_code)
        router = Router(
            {name: RayReplica(handle, name) for name, handle in replicas.items()},
            empty_deadline_s=EMPTY_S,
        )
        self._server = RewardModelServer(
            LLMServerClient(router, self._config.rollout_seed),
            tokenizer,
            seed=self._config.rollout_seed,
            max_prompt_tokens=model.rollout.prompt_length,
            max_response_tokens=model.rollout.response_length,
            stop_token_ids=stop_token_ids(path, tokenizer),
        )
        return await self._server.start(host)


class RewardModel:
    """The reward model of a run; picklable.

    Attributes:
        address: `host:port` for reward functions.
    """

    def __init__(self, router: Any, replicas: Mapping[str, ReplicaClient], address: str) -> None:
        self._router = router
        self._replicas = dict(replicas)
        self.address = address

    @property
    def handles(self) -> dict[str, ActorHandle]:
        """The replicas' actors, by name."""
        return {name: replica.handle for name, replica in self._replicas.items()}

    def wake_up(self, key: CallKey) -> None:
        """Get memory for keys and values."""
        for replica in self._replicas.values():
            replica.wake_up(key)
            replica.resume(key)

    def sleep(self, key: CallKey) -> None:
        """Finish what was asked and free the memory of keys and values."""
        for replica in self._replicas.values():
            replica.pause(key, False)
            replica.sleep(key)

    def kill(self) -> None:
        """End router and replicas."""
        kill_actor(self._router)
        for replica in self._replicas.values():
            replica.kill()


def start_reward_model(
    config: RunConfig,
    *,
    run_id: str,
    attempt: int,
    log_address: LogAddress | None = None,
    on_created: Callable[[str, Callable[[], None]], None] | None = None,
) -> RewardModel:
    """Start the replicas side by side and, when they are ready, the router.

    Args:
        config: Of the run.
        run_id: Whose calls they admit.
        attempt: Fencing token.
        log_address: Where their log records go.
        on_created: Gets the name of all and what ends them, before a model is loaded.

    Raises:
        ConfigError: the folder holds no such model, tokenizer or chat template.
        DeadlineExceededError: one is not ready within `deadlines.start`.
        ActorUnavailableError: one died while it started.
    """
    spec = reward_model_spec(config)
    replicas = {
        name: start_replica(
            spec,
            run_id=run_id,
            attempt=attempt,
            name=name,
            deadlines=ServerDeadlines.from_config(config),
            user_modules=config.trainer.user_modules,
            log_address=log_address,
        )
        for name in (f"{NAME}-{i}" for i in range(config.reward.reward_model.rollout.num_replicas))
    }
    router: Any = RewardRouterActor.remote(config, log_address)
    created = RewardModel(router, replicas, "")
    if on_created is not None:
        on_created(NAME, created.kill)
    try:
        for replica in replicas.values():
            replica.wait_ready(config.deadlines.start)
        handles = {name: replica.handle for name, replica in replicas.items()}
        address = wait_for_reply(
            router.start.remote(handles, reachable_host()),
            what=f"{NAME} router.start",
            deadline_s=config.deadlines.start,
        )
    except BaseException:
        created.kill()
        raise
    logger.info("the reward model answers at %s: %s", address, spec)
    found = RewardModel(router, replicas, address)
    if config.scores_later:
        found.sleep(CallKey(run_id=run_id, attempt=attempt, global_step=0, phase="start"))
    return found
