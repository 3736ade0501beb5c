"""Start and end the Ray side of one attempt: every actor of a run is made here, before step 1.

Cluster.start  Ray → ledger and queue host, trainer, replicas, executors, side by side
Cluster.shutdown  the reverse; what belongs to the run is dead when it returns
"""

import asyncio
import functools
import importlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle

from rlcore.checkpoint_engine.base import TransferSettings
from rlcore.checkpoint_engine.manager import CheckpointEngineManager
from rlcore.cluster.agent_loop_worker import AgentLoopWorkerHandle
from rlcore.cluster.calls import kill_actor, wait_for_reply
from rlcore.cluster.connect import NUM_STORAGE_UNITS, RAY_END_S, connect_ray
from rlcore.cluster.ends import Ends
from rlcore.cluster.executor import ExecutorPool, PoolLimits
from rlcore.cluster.ledger import start_ledger
from rlcore.cluster.ledger_client import LedgerClient
from rlcore.cluster.llm_server import ReplicaClient, replica_starter, start_replicas
from rlcore.cluster.queue_host import QueueHostClient, start_queue_host, stop_queue_host
from rlcore.cluster.replica_supervisor import ReplicaSupervisor
from rlcore.cluster.reward_model import RewardModel, start_reward_model
from rlcore.cluster.training_worker import TrainingGroup, start_training_group
from rlcore.config import RunConfig
from rlcore.config.cores import TRAINER, Cores, core_shares
from rlcore.config.queue_size import queue_capacity
from rlcore.daemon_thread import DaemonThread, in_daemon_thread
from rlcore.errors import TransientError
from rlcore.rollout.health import HealthLimits
from rlcore.trainer.run_folder import RunFolder
from rlcore.types import CallKey

if TYPE_CHECKING:
    from rlcore.trainer.base import PPOTrainer

logger = logging.getLogger(__name__)

NUM_EXECUTORS = 2
"""One that works, and one that is ready when the first was killed."""

GIVE_UP_S = 5.0
"""How long a collaborator may take to refuse a try from then on."""

END_S = 20.0
"""For everything to end, whatever hangs: a cancelled run has 25 s from the cancel to its exit."""

HOST_END_S = 15.0
"""For the queue's actors to be gone; within END_S - RAY_END_S."""


def import_trainer() -> None:
    """Import what phases need; runs in an executor."""
    importlib.import_module("rlcore.trainer.base")


class Cluster:
    """The actors of one attempt and the clients that reach them.

    Attributes:
        ledger: The one truth about prompts.
        queue_host: Owner of TransferQueue.
        training: The training group.
        replicas: The LLM servers, by name.
        reward_model: The one of `reward.reward_model`; None without.
        executors: Where phases' bodies run.
        checkpoint_manager: Publishes weights.
    """

    ledger: LedgerClient
    queue_host: QueueHostClient
    training: TrainingGroup
    checkpoint_manager: CheckpointEngineManager
    executors: ExecutorPool

    def __init__(
        self, config: RunConfig, *, folder: RunFolder, attempt: int, total_steps: int
    ) -> None:
        self.config = config
        self.folder = folder
        self.attempt = attempt
        self.total_steps = total_steps
        self.replicas: dict[str, ReplicaClient] = {}
        self.reward_model: RewardModel | None = None
        self._collaborators: dict[str, Any] = {}
        self._watch: ReplicaSupervisor | None = None
        self._starting: dict[asyncio.Future[Any], str] = {}
        self._ends = Ends(budget_s=END_S, last_s=RAY_END_S)
        self._ray = DaemonThread("ray")  # with its end those of Ray's processes would come

    async def start(self) -> None:
        """Start everything, side by side; what has started is ended if something fails.

        Raises:
            ConfigError: the Ray cluster is too small or belongs to another run.
            DeadlineExceededError: an actor is not ready within `deadlines.start`; names it.
        """
        self._starting[connected := asyncio.wrap_future(self._ray.submit(self._connect))] = "Ray"
        await _all_done(connected)
        self.executors = ExecutorPool(
            NUM_EXECUTORS,
            user_modules=self.config.python_files,
            on_fence=self._give_up,
            limits=PoolLimits(start_deadline_s=self.config.deadlines.start),
        )
        self._at_end("executors", self.executors.close)
        await _all_done(self._begin(self.executors.start, "executors"))
        warm_ups = [asyncio.ensure_future(self._warm_up_executor()) for _ in range(NUM_EXECUTORS)]
        self._starting.update((job, "the warm-up of an executor") for job in warm_ups)
        reward_models = (
            [self._begin(self._start_reward_model, "reward model")]
            if self.config.reward.reward_model.enable
            else []
        )
        await _all_done(
            *reward_models,
            self._begin(self._start_buffer, "ledger and queue"),
            self._begin(self._start_training, "trainer"),
            self._begin(self._start_replicas, "replicas"),
            *warm_ups,
        )
        self._collaborators = {
            "ledger": self.ledger.handle,
            **{f"trainer rank {i}": handle for i, handle in enumerate(self.training.handles)},
            **{name: replica.handle for name, replica in self.replicas.items()},
            **({} if self.reward_model is None else self.reward_model.handles),
        }
        self.checkpoint_manager = CheckpointEngineManager(
            self.training,
            self.replicas,
            backend=self.config.actor_rollout_ref.rollout.checkpoint_engine.backend,
            settings=TransferSettings.from_config(self.config),
        )

    def watch_replicas(self, key: Callable[[str], CallKey]) -> None:
        """Replace replicas that die or hang from now on; `key` names the caller of a phase."""
        self._watch = ReplicaSupervisor(
            self.checkpoint_manager,
            self.replicas,
            start=self._start_replica,
            key=key,
            limits=HealthLimits(start_s=self.config.deadlines.start),
            on_change=self._replicas_changed,
        )
        self._watch.start()

    def serving(self) -> dict[str, ActorHandle]:
        """Return the replicas that may get requests.

        Raises:
            ReplicaDiedError, ConfigError: one was lost and could not be replaced.
        """
        if self._watch is not None:
            self._watch.raise_if_failed()
        return {name: replica.handle for name, replica in self.replicas.items()}

    def _replicas_changed(self, serving: Mapping[str, Any]) -> None:
        self.replicas = dict(serving)
        gone = [name for name in self._collaborators if name.startswith("replica-")]
        kept = {n: h for n, h in self._collaborators.items() if n not in gone}
        self._collaborators = kept | {name: r.handle for name, r in serving.items()}

    def _end_replicas(self) -> None:
        if self._watch is not None:
            self._watch.stop()
        for replica in self.replicas.values():
            replica.kill()

    def _begin(self, start: Callable[[], None], what: str) -> asyncio.Future[Any]:
        """Start something in a thread that neither a cancel nor the process's end waits for."""
        job = asyncio.wrap_future(in_daemon_thread(start, name=f"start of {what}"))
        self._starting[job] = f"the start of {what}"
        return job

    def _connect(self) -> None:
        if connect_ray(self.config):
            self._ends.set_last("Ray", ray.shutdown)

    def _give_up(self, key: CallKey) -> None:
        """Let every collaborator refuse a try whose executor is about to be killed.

        One that does not answer is left: the executor dies all the same, and the next try refuses
        the older one by its number.
        """
        replies = {name: h.give_up.remote(key) for name, h in self._collaborators.items()}
        ends = time.monotonic() + GIVE_UP_S
        for name, reply in replies.items():
            left_s = max(0.1, ends - time.monotonic())
            try:
                wait_for_reply(reply, what=f"{name}.give_up", deadline_s=left_s)
            except TransientError as error:
                logger.warning("giving up %s: %s", key, error)

    async def _warm_up_executor(self) -> None:
        """Import torch in an executor now, so that the first phase does not wait for it."""
        key = CallKey(
            run_id=self.folder.run_id, attempt=self.attempt, global_step=0, phase="warm_up"
        )
        deadline_s = self.config.deadlines.start
        await self.executors.run(import_trainer, key=key, deadline_s=deadline_s)

    def _start_buffer(self) -> None:
        run_id, deadlines = self.folder.run_id, self.config.deadlines
        backend = self.config.transfer_queue.backend
        in_mooncake = backend.storage_backend == "MooncakeStore"
        journal = self.folder.path / "journal" / f"attempt-{self.attempt}.jsonl"
        journal.parent.mkdir(exist_ok=True)
        self.ledger = start_ledger(
            run_id,
            str(journal),
            self.attempt,
            deadline_s=deadlines.queue,
            max_failure_ratio=self.config.reward.max_failure_ratio,
            capacity=queue_capacity(self.config),
        )
        self._at_end("ledger", kill_actor, self.ledger.handle)
        self.queue_host = start_queue_host(
            run_id,
            self.attempt,
            witness=self.ledger.handle,
            num_storage_units=NUM_STORAGE_UNITS,
            store=backend.MooncakeStore if in_mooncake else None,
            deadline_s=deadlines.queue,
            start_s=deadlines.start,
        )
        stop = functools.partial(stop_queue_host, deadline_s=HOST_END_S)
        self._at_end("queue host", stop, run_id, self.attempt)

    def _start_training(self) -> None:
        self.training = start_training_group(
            self.config,
            run_id=self.folder.run_id,
            attempt=self.attempt,
            folder=self.folder.path,
            total_steps=self.total_steps * self._mode().inner_steps_of(self.config),
            cores=self._cores().get(TRAINER, ()),
            log_address=self.executors.log_address,
            on_created=lambda group: self._at_end("trainer", group.stop),
        )

    def restart_training(self) -> None:
        """Start the training group anew, with the start weights, in the place of one that is lost.

        Whoever has the group has the new one then. What is left of the old one is ended first: the
        devices, and the segment of weights, are free.

        Raises:
            TransientError: it did not start in time, or died while it started.
        """
        self.training.stop()
        lost = self.training
        self._start_training()
        lost.become(self.training)
        self.training = lost
        ranks = {f"trainer rank {i}": handle for i, handle in enumerate(lost.handles)}
        self._collaborators = {**self._collaborators, **ranks}

    def _mode(self) -> "type[PPOTrainer]":
        # Imported here: modes import this package's clients.
        from rlcore.trainer.modes import get_trainer_cls

        return get_trainer_cls(self.config.trainer.v1.trainer_mode)

    def _cores(self) -> Mapping[str, Cores]:
        return core_shares(self.config, is_separate=self._mode().is_separate)

    def _start_replicas(self) -> None:
        self._start_replica = replica_starter(
            self.config,
            run_id=self.folder.run_id,
            attempt=self.attempt,
            cores=self._cores(),
            log_address=self.executors.log_address,
        )
        self._at_end("replicas", self._end_replicas)
        self.replicas = start_replicas(
            self.config,
            self._start_replica,
            on_created=lambda name, replica: self._at_end(name, replica.kill),
        )

    def _start_reward_model(self) -> None:
        self.reward_model = start_reward_model(
            self.config,
            run_id=self.folder.run_id,
            attempt=self.attempt,
            log_address=self.executors.log_address,
            on_created=lambda name, kill: self._at_end(name, kill),
        )

    def _at_end(self, what: str, action: Callable[..., Any], *args: Any) -> None:
        """Do `action` at the end; at once, and stop the caller, if the end has come meanwhile."""
        self._ends.add(what, action, *args)

    def begin_end(self) -> None:
        """Let the time that `shutdown` has run from now on: something else ends before."""
        self._ends.begin()

    async def shutdown(self) -> None:
        """End every actor of the attempt, and Ray if this process started or joined it.

        Takes END_S at most, whatever hangs, also when `start` was cancelled: what it had made by
        then is ended, and what it makes later ends itself.
        """
        await self._ends.run(self._starting)
        self._ray.close()

    def new_agent_loop_worker(self, index: int) -> AgentLoopWorkerHandle:
        """Create the worker of producer `index`; the supervisor waits for it and ends it."""
        return AgentLoopWorkerHandle.create(
            self.config,
            index,
            attempt=self.attempt,
            ledger=self.ledger.handle,
            queue_host=self.queue_host.handle,
            replicas=self.serving(),
            reward_address=None if self.reward_model is None else self.reward_model.address,
            log_address=self.executors.log_address,
        )


async def _all_done(*jobs: asyncio.Future[Any]) -> None:
    """Wait for all, then raise what the first failed one raised; a cancel leaves them running."""
    await asyncio.wait(jobs)
    failures = [error for job in jobs if (error := job.exception()) is not None]
    if failures:
        raise failures[0]
