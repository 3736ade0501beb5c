"""The training worker as a Ray actor, and the client of its ranks.

The actor reads the columns of a leased batch from the queue, gives them to `TrainingWorker`
(rlcore/training/worker.py) and writes what comes back; no row passes through the driver.

One file, though a long one: actor and client are the two ends of the same calls, and what crosses
between them can be judged only side by side.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle

from rlcore.checkpoint_engine.segment_file import hold_segment, remove_leftovers, segment_path
from rlcore.cluster.calls import kill_actor, wait_for_reply
from rlcore.cluster.group_call import call_together
from rlcore.cluster.log_stream import LogAddress, connect_log_stream
from rlcore.cluster.process_name import ProcessName
from rlcore.cluster.worker_environment import COMPUTE_ENVIRONMENT, compute_on
from rlcore.config import RunConfig
from rlcore.config.cores import Cores
from rlcore.errors import ActorUnavailableError, DeadlineExceededError
from rlcore.training.spec import TrainingSpec
from rlcore.types import CallKey, SampledBatch, WeightMeta
from rlcore.user_code import load_user_modules

if TYPE_CHECKING:
    from rlcore.training.ranks import Rendezvous

logger = logging.getLogger(__name__)

FORWARD_COLUMNS = ["prompts", "responses", "response_mask"]
"""What a pass without gradient reads."""

SHARED_MEMORY = "/dev/shm"

EXIT_S = 1.0
"""How long a rank may take to end by itself after Ray has told it to."""


@ray.remote(  # pyright: ignore[reportCallIssue] (Ray's stubs know no concurrency_groups)
    num_cpus=0, max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1}
)
class TrainingWorkerActor:
    """One rank. Methods run one after the other; see TrainingWorker for what they do and raise.

    Two have a lane of their own: `give_up` must not wait for the update that it ends, nor a replica
    that joins for one that trains.
    """

    def __init__(self, log_address: LogAddress | None, rank: int = 0) -> None:
        self._rank = rank
        self._store: Any = None
        if log_address is not None:
            connect_log_stream(log_address, f"trainer-rank-{rank}")

    def open_store(self) -> tuple[str, int]:
        """Open the meeting place of the ranks here; return host and port."""
        from rlcore.tcp_store import open_store
        from rlcore.training.ranks import reachable_address

        host = reachable_address()
        self._store = open_store(host)
        return host, self._store.port

    def build(
        self,
        spec: TrainingSpec,
        queue_deadline_s: float,
        user_modules: Sequence[str],
        places: "Sequence[Rendezvous]" = (),
    ) -> None:
        """Meet the other ranks, if there are any, and load the model.

        Not in the constructor: Ray reports what that raises as the death of the actor, by which a
        damaged model folder would look like a fault that a retry may cure.

        Raises:
            ConfigError: a user's module or the model cannot be loaded.
        """
        # Before torch starts its threads.
        compute_on(spec.cores)
        load_user_modules(user_modules)
        if self._rank == 0:  # which writes the published weights
            hold_segment(segment_path(SHARED_MEMORY, spec.run_id))
        # Imported here: the driver imports this module, and needs neither model nor queue.
        from rlcore.buffer.transfer_queue import attached_queue
        from rlcore.training.ranks import Ranks
        from rlcore.training.worker import TrainingWorker

        self._queue = attached_queue(queue_deadline_s)
        ranks = Ranks.join(places[self._rank], self._store) if places else Ranks()
        self._worker = TrainingWorker(spec, ranks)

    def process(self) -> ProcessName:
        """Say which process this is."""
        return ProcessName.of_this()

    def state(self) -> dict[str, Any]:
        """See TrainingWorker.state."""
        return self._worker.state()

    @ray.method(concurrency_group="control")
    def give_up(self, key: CallKey) -> None:
        """See TrainingWorker.give_up."""
        self._worker.give_up(key)

    @ray.method(concurrency_group="control")
    def published_weights(self) -> WeightMeta | None:
        """See TrainingWorker.published."""
        return self._worker.published

    def compute_log_prob(
        self, key: CallKey, partition_id: str, batch: SampledBatch, keeps_start: bool = False
    ) -> dict[str, float]:
        """Write `old_log_probs` and `entropy` of the batch; return their metrics."""
        keys, rows = self._read_own(partition_id, batch, [*FORWARD_COLUMNS, "rollout_log_probs"])
        columns, metrics = self._worker.compute_log_prob(key, rows, keeps_start=keeps_start)
        self._write(partition_id, keys, columns)
        return metrics

    def compute_ref_log_prob(
        self, key: CallKey, partition_id: str, batch: SampledBatch
    ) -> dict[str, float]:
        """Write `ref_log_prob` of the batch; there are no metrics."""
        keys, rows = self._read_own(partition_id, batch, FORWARD_COLUMNS)
        self._write(partition_id, keys, self._worker.compute_ref_log_prob(key, rows))
        return {}

    def compute_teacher_log_prob(
        self, key: CallKey, partition_id: str, batch: SampledBatch
    ) -> dict[str, float]:
        """Write `teacher_logprobs` of the batch; return their metrics."""
        keys, rows = self._read_own(partition_id, batch, [*FORWARD_COLUMNS, "old_log_probs"])
        columns, metrics = self._worker.compute_teacher_log_prob(key, rows)
        self._write(partition_id, keys, columns)
        return metrics

    def compute_values(
        self, key: CallKey, partition_id: str, batch: SampledBatch
    ) -> dict[str, float]:
        """Write `values` of the batch; return their metrics."""
        keys, rows = self._read_own(partition_id, batch, FORWARD_COLUMNS)
        columns, metrics = self._worker.compute_values(key, rows)
        self._write(partition_id, keys, columns)
        return metrics

    def update_actor(
        self, key: CallKey, partition_id: str, batch: SampledBatch
    ) -> dict[str, float]:
        """Make the policy's optimizer steps of one inner step on the batch."""
        share = self._worker.share(key, _uids(batch), _lengths(batch))
        columns = self._worker.updater.columns
        rows = self._read(partition_id, [batch.keys[row] for row in share.rows], columns)
        groups = [batch.tags[row]["uid"] for row in share.rows]
        return self._worker.update_actor(key, rows, groups, share.steps)

    def update_critic(
        self, key: CallKey, partition_id: str, batch: SampledBatch
    ) -> dict[str, float]:
        """Make the critic's optimizer steps of one inner step on the batch."""
        from rlcore.training.critic import VALUE_COLUMNS

        share = self._worker.share(key, _uids(batch), _lengths(batch), of="critic")
        rows = self._read(partition_id, [batch.keys[row] for row in share.rows], VALUE_COLUMNS)
        groups = [batch.tags[row]["uid"] for row in share.rows]
        return self._worker.update_critic(key, rows, groups, share.steps)

    def _write(self, partition_id: str, keys: list[str], columns: dict[str, Any]) -> None:
        if keys:
            self._queue.put(partition_id, keys, columns)

    def _read_own(
        self, partition_id: str, batch: SampledBatch, columns: Sequence[str]
    ) -> tuple[list[str], dict[str, Any]]:
        """Return keys and columns of this rank's part of the batch."""
        from rlcore.training.balance import balanced_rows

        ranks = self._worker.ranks
        everything = range(len(batch.keys))
        parts = balanced_rows(everything, _uids(batch), _lengths(batch), ranks.size)
        keys = [batch.keys[row] for row in parts[ranks.rank]]
        return keys, self._read(partition_id, keys, columns)

    def _read(self, partition_id: str, keys: list[str], columns: Sequence[str]) -> dict[str, Any]:
        if not keys:
            return {name: [] for name in columns}
        return self._queue.get(partition_id, keys, list(columns))

    def publish_weights(self, key: CallKey, directory: str, dtype: str) -> WeightMeta | None:
        """See TrainingWorker.publish_weights."""
        return self._worker.publish_weights(key, directory, dtype)

    def save_checkpoint(self, key: CallKey, folder: str) -> None:
        """See TrainingWorker.save_checkpoint."""
        self._worker.save_checkpoint(key, folder)

    def load_checkpoint(self, key: CallKey, folder: str) -> None:
        """See TrainingWorker.load_checkpoint."""
        self._worker.load_checkpoint(key, folder)

    def export_hf(self, key: CallKey, folder: str) -> None:
        """See TrainingWorker.export_hf."""
        self._worker.export_hf(key, folder)


class TrainingGroup:
    """Client of all ranks of one training group; picklable, synchronous, each call with a deadline.

    A group lives and dies together: the first rank's failure is raised, and where the others cannot
    go on without it all are ended. The answer is rank 0's.

    Example:
        >>> group = start_training_group(config, run_id="r1", attempt=1, folder=folder)
        >>> group.update_actor(key, "r1/train", batch)["actor/pg_loss"]
    """

    def __init__(
        self, handles: Sequence[ActorHandle], *, run_id: str, publish_dtype: str, deadline_s: float
    ) -> None:
        self.handles = list(handles)
        self.run_id = run_id
        self.publish_dtype = publish_dtype
        self.deadline_s = deadline_s
        self.processes: list[ProcessName] = []
        """Of the ranks, once they are built."""

    def with_deadline(self, deadline_s: float) -> "TrainingGroup":
        """Return a client of the same ranks whose calls may take `deadline_s`."""
        group = TrainingGroup(
            self.handles,
            run_id=self.run_id,
            publish_dtype=self.publish_dtype,
            deadline_s=deadline_s,
        )
        group.processes = self.processes
        return group

    def become(self, other: "TrainingGroup") -> None:
        """Be a client of another group's ranks from now on: who has this one needs no new one."""
        self.handles, self.processes = list(other.handles), list(other.processes)

    def build(
        self, spec: TrainingSpec, queue_deadline_s: float, user_modules: Sequence[str]
    ) -> None:
        """Load the model in every rank.

        Raises:
            ConfigError: a user's module or the model cannot be loaded.
            TrainingGroupLostError: a rank is dead or does not answer; all are ended.
        """
        asked = [handle.process.remote() for handle in self.handles]
        self.processes = [
            wait_for_reply(reply, what=f"trainer rank {rank}", deadline_s=self.deadline_s)
            for rank, reply in enumerate(asked)
        ]
        places: list[Rendezvous] = []
        if len(self.handles) > 1:
            places = self._meeting_places(spec.device)
        self._call("build", spec, queue_deadline_s, list(user_modules), places)

    def _meeting_places(self, device: str) -> "list[Rendezvous]":
        from rlcore.training.ranks import Rendezvous

        host, port = wait_for_reply(
            self.handles[0].open_store.remote(),
            what="trainer rank 0: open_store",
            deadline_s=self.deadline_s,
        )
        return [
            Rendezvous(
                host=host,
                port=port,
                rank=rank,
                size=len(self.handles),
                device=device,
                timeout_s=self.deadline_s,
            )
            for rank in range(len(self.handles))
        ]

    def state(self) -> dict[str, Any]:
        """Return rank 0's counters."""
        return self._call("state")

    def balance_metrics(self, batch: SampledBatch) -> dict[str, float]:
        """Return verl's `global_seqlen` metrics: tokens per rank, as they came and balanced."""
        from rlcore.training.balance import balance_metrics

        return balance_metrics(_uids(batch), _lengths(batch), len(self.handles))

    def compute_log_prob(
        self,
        key: CallKey,
        partition_id: str,
        batch: SampledBatch,
        *,
        keeps_start: bool = False,
    ) -> dict[str, float]:
        """Write `old_log_probs` and `entropy` of the batch; return their metrics.

        Raises:
            FencedError, DataError: see TrainingWorker.compute_log_prob.
            TrainingGroupLostError: a rank is dead or does not answer; all are ended.
        """
        return self._call("compute_log_prob", key, partition_id, batch, keeps_start)

    def update_actor(
        self, key: CallKey, partition_id: str, batch: SampledBatch
    ) -> dict[str, float]:
        """Make the inner step's optimizer steps, each once; return the metrics.

        Raises:
            FencedError, DataError, NonFiniteLossError: see TrainingWorker.update_actor.
            TrainingGroupLostError: a rank is dead or does not answer; all are ended.
        """
        return self._call("update_actor", key, partition_id, batch)

    def compute_ref_log_prob(
        self, key: CallKey, partition_id: str, batch: SampledBatch
    ) -> dict[str, float]:
        """Write `ref_log_prob` of the batch under the frozen reference.

        Raises:
            FencedError, DataError, ConfigError: see TrainingWorker.compute_ref_log_prob.
            TrainingGroupLostError: a rank is dead or does not answer; all are ended.
        """
        return self._call("compute_ref_log_prob", key, partition_id, batch)

    def compute_teacher_log_prob(
        self, key: CallKey, partition_id: str, batch: SampledBatch
    ) -> dict[str, float]:
        """Write `teacher_logprobs` of the batch; return their metrics.

        Raises:
            FencedError, DataError, ConfigError: see TrainingWorker.compute_teacher_log_prob.
            DeadlineExceededError, ActorUnavailableError: a rank does not answer.
        """
        return self._call("compute_teacher_log_prob", key, partition_id, batch)

    def compute_values(
        self, key: CallKey, partition_id: str, batch: SampledBatch
    ) -> dict[str, float]:
        """Write `values` of the batch under the critic's present weights; return their metrics.

        Raises:
            FencedError, DataError, ConfigError: see TrainingWorker.compute_values.
            TrainingGroupLostError: a rank is dead or does not answer; all are ended.
        """
        return self._call("compute_values", key, partition_id, batch)

    def update_critic(
        self, key: CallKey, partition_id: str, batch: SampledBatch
    ) -> dict[str, float]:
        """Make the critic's optimizer steps, each once; return the metrics.

        Raises:
            FencedError, DataError, NonFiniteLossError, ConfigError: see
                TrainingWorker.update_critic.
            TrainingGroupLostError: a rank is dead or does not answer; all are ended.
        """
        return self._call("update_critic", key, partition_id, batch)

    def publish_weights(self, key: CallKey) -> WeightMeta:
        """Write the weights to shared memory in the replicas' type.

        Raises:
            FencedError, WeightSyncError: see TrainingWorker.publish_weights.
            TrainingGroupLostError: a rank is dead or does not answer; all are ended.
        """
        return self._call("publish_weights", key, SHARED_MEMORY, self.publish_dtype)

    def published_weights(self) -> WeightMeta | None:
        """Return what was published last, also while it trains; None: nothing yet.

        Raises:
            TrainingGroupLostError: a rank is dead or does not answer; all are ended.
        """
        return self._call("published_weights")

    def save_checkpoint(self, key: CallKey, folder: Path) -> None:
        """Write the training state to `folder`.

        Raises:
            FencedError, CheckpointError: see TrainingWorker.save_checkpoint.
            TrainingGroupLostError: a rank is dead or does not answer; all are ended.
        """
        self._call("save_checkpoint", key, str(folder))

    def load_checkpoint(self, key: CallKey, folder: Path) -> None:
        """Take over the training state in `folder`.

        Raises:
            FencedError, CheckpointError: see TrainingWorker.load_checkpoint.
            TrainingGroupLostError: a rank is dead or does not answer; all are ended.
        """
        self._call("load_checkpoint", key, str(folder))

    def export_hf(self, key: CallKey, folder: Path) -> None:
        """Write the model as a Hugging Face folder.

        Raises:
            FencedError, CheckpointError: see TrainingWorker.export_hf.
            TrainingGroupLostError: a rank is dead or does not answer; all are ended.
        """
        self._call("export_hf", key, str(folder))

    def stop(self, deadline_s: float = 10.0) -> None:
        """End every rank, wait for its death, then remove the segment of weights.

        Raises:
            DeadlineExceededError: a rank still answers after `deadline_s`.
        """
        for handle in self.handles:
            kill_actor(handle)
        for process in self.processes:
            process.kill(patience_s=EXIT_S)  # Ray cannot end one that is stopped or hangs
        ends = time.monotonic() + deadline_s
        for rank, handle in enumerate(self.handles):
            # A kill returns before the process is gone, which could write the segment once more.
            while _answers(handle, ends - time.monotonic()):
                if time.monotonic() > ends:
                    raise DeadlineExceededError(
                        f"trainer rank {rank} lives {deadline_s:g} s after it was killed"
                    )
                time.sleep(0.05)
        segment_path(SHARED_MEMORY, self.run_id).unlink(missing_ok=True)

    def _call(self, method: str, *args: Any) -> Any:
        return call_together(self.handles, method, args, deadline_s=self.deadline_s)


def _uids(batch: SampledBatch) -> list[str]:
    return [tag["uid"] for tag in batch.tags]


def _lengths(batch: SampledBatch) -> list[int]:
    return [int(tag["seq_len"]) for tag in batch.tags]


def _answers(handle: ActorHandle, within_s: float) -> bool:
    """Whether the actor's process is there, be it too busy to answer."""
    try:
        wait_for_reply(handle.state.remote(), what="trainer", deadline_s=max(within_s, 0.1))
    except ActorUnavailableError:
        return False
    except DeadlineExceededError:
        return True
    return True


def start_training_group(
    config: RunConfig,
    *,
    run_id: str,
    attempt: int,
    folder: Path,
    total_steps: int | None = None,
    cores: Cores = (),
    log_address: LogAddress | None = None,
    on_created: Callable[[TrainingGroup], None] | None = None,
) -> TrainingGroup:
    """Start the training worker of a run and wait until its model is loaded.

    Args:
        config: Of the run.
        run_id: Whose calls it admits.
        attempt: Fencing token.
        folder: Run folder.
        total_steps: Steps of the run, where the learning-rate schedule ends; None:
            `trainer.total_training_steps`.
        cores: That it computes on; empty: all.
        log_address: Where its log records go.
        on_created: Gets the group before its model is loaded, to be able to end it meanwhile.

    Raises:
        DeadlineExceededError: it is not ready within `deadlines.start`.
        ActorUnavailableError: it died while it started.
        ConfigError: the model cannot be loaded, or the learning-rate schedule lacks the number of
            steps.
    """
    spec = TrainingSpec.from_config(
        config,
        run_id=run_id,
        attempt=attempt,
        folder=folder,
        total_steps=total_steps,
        cores=cores,
    )
    for path in remove_leftovers(SHARED_MEMORY):
        logger.info("removed %s, the weights of a run that is dead", path)
    actor: Any = TrainingWorkerActor
    options: dict[str, Any] = {"runtime_env": {"env_vars": COMPUTE_ENVIRONMENT}}
    if spec.device == "cuda":
        options["num_gpus"] = 1
    num_ranks = config.num_ranks
    handles = [actor.options(**options).remote(log_address, rank) for rank in range(num_ranks)]
    group = TrainingGroup(
        handles,
        run_id=run_id,
        publish_dtype=config.actor_rollout_ref.rollout.dtype,
        deadline_s=config.deadlines.start,
    )
    try:
        if on_created is not None:
            on_created(group)
        group.build(spec, config.deadlines.queue, config.user_modules)
        state = group.state()
    except BaseException:
        for handle in handles:
            kill_actor(handle)
        raise
    logger.info(
        "trainer is ready: %d rank(s), packing %s, %d threads each",
        num_ranks,
        state["packing"],
        state["num_threads"],
    )
    return group.with_deadline(config.deadlines.first_call)
