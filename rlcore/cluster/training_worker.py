"""The training worker as a Ray actor, and the client of its ranks.

The actor reads the columns of a leased batch from the queue, gives them to `TrainingWorker`
(rlcore/training/worker.py) and writes what comes back; no row passes through the driver.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from rlcore.checkpoint_engine.segment_file import hold_segment, remove_leftovers, segment_path
from rlcore.cluster.calls import kill_actor, wait_for_reply
from rlcore.cluster.log_stream import LogAddress, connect_log_stream
from rlcore.cluster.worker_environment import COMPUTE_ENVIRONMENT
from rlcore.config import RunConfig
from rlcore.errors import ActorUnavailableError, DeadlineExceededError
from rlcore.training.spec import TrainingSpec
from rlcore.types import CallKey, SampledBatch, WeightMeta
from rlcore.user_code import load_user_modules

logger = logging.getLogger(__name__)

SHARED_MEMORY = "/dev/shm"


@ray.remote(  # pyright: ignore[reportCallIssue] (Ray's stubs know no concurrency_groups)
    num_cpus=0, max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1}
)
class TrainingWorkerActor:
    """One rank. Methods run one after the other; see TrainingWorker for what they do and raise.

    Only `give_up` has a lane of its own: it must not wait for the update that it ends.
    """

    def __init__(self, log_address: LogAddress | None) -> None:
        if log_address is not None:
            connect_log_stream(log_address, "trainer-rank-0")

    def build(
        self, spec: TrainingSpec, queue_deadline_s: float, user_modules: Sequence[str]
    ) -> None:
        """Load the model.

        Not in the constructor: Ray reports what that raises as the death of the actor, by which a
        damaged model folder would look like a fault that a retry may cure.

        Raises:
            ConfigError: a user's module or the model cannot be loaded.
        """
        load_user_modules(user_modules)
        hold_segment(segment_path(SHARED_MEMORY, spec.run_id))
        # Imported here: the driver imports this module, and needs neither model nor queue.
        from rlcore.buffer.transfer_queue import attached_queue
        from rlcore.training.worker import TrainingWorker

        self._queue = attached_queue(queue_deadline_s)
        self._worker = TrainingWorker(spec)

    def state(self) -> dict[str, Any]:
        """See TrainingWorker.state."""
        return self._worker.state()

    @ray.method(concurrency_group="control")
    def give_up(self, key: CallKey) -> None:
        """See TrainingWorker.give_up."""
        self._worker.give_up(key)

    def compute_log_prob(
        self, key: CallKey, partition_id: str, batch: SampledBatch, keeps_start: bool = False
    ) -> dict[str, float]:
        """Write `old_log_probs` and `entropy` of the batch; return their metrics."""
        columns = ["prompts", "responses", "response_mask", "rollout_log_probs"]
        rows = self._queue.get(partition_id, batch.keys, columns)
        columns_out, metrics = self._worker.compute_log_prob(key, rows, keeps_start=keeps_start)
        self._queue.put(partition_id, batch.keys, columns_out)
        return metrics

    def update_actor(
        self, key: CallKey, partition_id: str, batch: SampledBatch
    ) -> dict[str, float]:
        """Make the optimizer steps of one inner step on the batch."""
        rows = self._queue.get(partition_id, batch.keys, self._worker.updater.columns)
        return self._worker.update_actor(key, rows, [tag["uid"] for tag in batch.tags])

    def publish_weights(self, key: CallKey, directory: str, dtype: str) -> WeightMeta:
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

    A group lives and dies together: the first rank's failure is raised, the answer is rank 0's.

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

    def with_deadline(self, deadline_s: float) -> "TrainingGroup":
        """Return a client of the same ranks whose calls may take `deadline_s`."""
        return TrainingGroup(
            self.handles,
            run_id=self.run_id,
            publish_dtype=self.publish_dtype,
            deadline_s=deadline_s,
        )

    def build(
        self, spec: TrainingSpec, queue_deadline_s: float, user_modules: Sequence[str]
    ) -> None:
        """Load the model in every rank.

        Raises:
            ConfigError: a user's module or the model cannot be loaded.
            DeadlineExceededError, ActorUnavailableError: a rank does not answer.
        """
        self._call("build", spec, queue_deadline_s, list(user_modules))

    def state(self) -> dict[str, Any]:
        """Return rank 0's counters."""
        return self._call("state")

    def balance_metrics(self, batch: SampledBatch) -> dict[str, float]:
        """Return verl's `global_seqlen` metrics: how many tokens rows and ranks have."""
        lengths = [float(tag["seq_len"]) for tag in batch.tags]
        total = sum(lengths)
        ranks = len(self.handles)
        return {
            "global_seqlen/min": min(lengths, default=0.0),
            "global_seqlen/max": max(lengths, default=0.0),
            "global_seqlen/mean": total / max(len(lengths), 1),
            "global_seqlen/per_rank": total / ranks,
        }

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
            DeadlineExceededError, ActorUnavailableError: a rank does not answer.
        """
        return self._call("compute_log_prob", key, partition_id, batch, keeps_start)

    def update_actor(
        self, key: CallKey, partition_id: str, batch: SampledBatch
    ) -> dict[str, float]:
        """Make the inner step's optimizer steps, each once; return the metrics.

        Raises:
            FencedError, DataError, NonFiniteLossError: see TrainingWorker.update_actor.
            DeadlineExceededError, ActorUnavailableError: a rank does not answer.
        """
        return self._call("update_actor", key, partition_id, batch)

    def publish_weights(self, key: CallKey) -> WeightMeta:
        """Write the weights to shared memory in the replicas' type.

        Raises:
            FencedError, WeightSyncError: see TrainingWorker.publish_weights.
            DeadlineExceededError, ActorUnavailableError: a rank does not answer.
        """
        return self._call("publish_weights", key, SHARED_MEMORY, self.publish_dtype)

    def save_checkpoint(self, key: CallKey, folder: Path) -> None:
        """Write the training state to `folder`.

        Raises:
            FencedError, CheckpointError: see TrainingWorker.save_checkpoint.
            DeadlineExceededError, ActorUnavailableError: a rank does not answer.
        """
        self._call("save_checkpoint", key, str(folder))

    def load_checkpoint(self, key: CallKey, folder: Path) -> None:
        """Take over the training state in `folder`.

        Raises:
            FencedError, CheckpointError: see TrainingWorker.load_checkpoint.
            DeadlineExceededError, ActorUnavailableError: a rank does not answer.
        """
        self._call("load_checkpoint", key, str(folder))

    def export_hf(self, key: CallKey, folder: Path) -> None:
        """Write the model as a Hugging Face folder.

        Raises:
            FencedError, CheckpointError: see TrainingWorker.export_hf.
            DeadlineExceededError, ActorUnavailableError: a rank does not answer.
        """
        self._call("export_hf", key, str(folder))

    def stop(self, deadline_s: float = 10.0) -> None:
        """End every rank, wait for its death, then remove the segment of weights.

        Raises:
            DeadlineExceededError: a rank still answers after `deadline_s`.
        """
        for handle in self.handles:
            kill_actor(handle)
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
        replies = [getattr(handle, method).remote(*args) for handle in self.handles]
        answers = [
            wait_for_reply(reply, what=f"trainer rank {rank}: {method}", deadline_s=self.deadline_s)
            for rank, reply in enumerate(replies)
        ]
        return answers[0]


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
        log_address: Where its log records go.
        on_created: Gets the group before its model is loaded, to be able to end it meanwhile.

    Raises:
        DeadlineExceededError: it is not ready within `deadlines.start`.
        ActorUnavailableError: it died while it started.
        ConfigError: the model cannot be loaded, or the learning-rate schedule lacks the number of
            steps.
    """
    spec = TrainingSpec.from_config(
        config, run_id=run_id, attempt=attempt, folder=folder, total_steps=total_steps
    )
    for path in remove_leftovers(SHARED_MEMORY):
        logger.info("removed %s, the weights of a run that is dead", path)
    actor: Any = TrainingWorkerActor
    options = {"runtime_env": {"env_vars": COMPUTE_ENVIRONMENT}}
    handle: ActorHandle = actor.options(**options).remote(log_address)
    group = TrainingGroup(
        [handle],
        run_id=run_id,
        publish_dtype=config.actor_rollout_ref.rollout.dtype,
        deadline_s=config.deadlines.start,
    )
    try:
        if on_created is not None:
            on_created(group)
        group.build(spec, config.deadlines.queue, config.trainer.user_modules)
        state = group.state()
    except BaseException:
        kill_actor(handle)
        raise
    logger.info("trainer is ready: packing %s, %d threads", state["packing"], state["num_threads"])
    return group.with_deadline(config.deadlines.first_call)
