"""The training worker of one rank: log-probs, updates, publication and checkpoints.

A plain object without Ray or queue: columns in, columns out. Each optimizer step, named by
(global_step, inner_step, optimizer_step), is applied once: a repeat of a finished update returns
the stored metrics, one of an interrupted update goes on where it stopped.
"""

import logging
import time
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from rlcore.algorithms import masked_mean, offpolicy_metrics
from rlcore.checkpoint_engine.segment import write_tensors
from rlcore.checkpoint_engine.segment_file import segment_path
from rlcore.errors import FencedError, NonFiniteLossError
from rlcore.fencing import Fence
from rlcore.training.batches import Rows, check_rows, micro_batches, mini_batches
from rlcore.training.checkpoint import (
    export_model,
    read_checkpoint,
    write_checkpoint,
)
from rlcore.training.policy import Policy
from rlcore.training.progress import Progress
from rlcore.training.spec import TrainingSpec
from rlcore.training.start_weights import StartWeights
from rlcore.training.update import PolicyUpdater
from rlcore.training.versions import WeightVersions
from rlcore.types import CallKey, WeightMeta

logger = logging.getLogger(__name__)

SUMMED = ("optimizer_steps", "nonfinite_steps", "trained_trajectories")


class TrainingWorker:
    """Holds the policy and its optimizer.

    Example:
        >>> worker = TrainingWorker(spec)
        >>> rows |= worker.compute_log_prob(key, rows)[0]
        >>> metrics = worker.update_actor(key, rows, groups=uids)
        >>> meta = worker.publish_weights(key, "/dev/shm", "bfloat16")
    """

    def __init__(self, spec: TrainingSpec) -> None:
        self.spec = spec
        if spec.num_threads is not None:
            torch.set_num_threads(spec.num_threads)
        if spec.full_determinism:
            torch.use_deterministic_algorithms(True)
        torch.manual_seed(spec.seed)
        self.policy = Policy(
            spec.model_path,
            dtype=spec.dtype,
            packing=spec.packing,
            trust_remote_code=spec.trust_remote_code,
        )
        self.updater = PolicyUpdater(self.policy, spec)
        self.versions = WeightVersions(Path(spec.folder) / "weight_version")
        self.progress = Progress()
        self.start_weights = StartWeights()
        self.published: WeightMeta | None = None
        """What the segment holds."""
        self._fence = Fence(spec.run_id, spec.attempt)

    def give_up(self, key: CallKey) -> None:
        """Refuse a try of a phase from now on; a call of it that runs goes on to its end."""
        self._fence.give_up(key)

    def compute_log_prob(
        self, key: CallKey, rows: Rows, *, keeps_start: bool = False
    ) -> tuple[Rows, dict[str, float]]:
        """Return the columns `old_log_probs` and `entropy` under the step's first weights.

        With the column `rollout_log_probs` the metrics tell how far the engine was off.

        Args:
            key: Names step and inner step.
            rows: Columns.
            keeps_start: The step has several inner steps: a copy of the weights at its first one
                is kept, and used at the others.

        Raises:
            FencedError: an older caller; the update of this inner step has begun, so that the
                weights are no longer those of its start; or the copy is not there.
            DataError: a column is missing or malformed.
        """
        self._fence.admit(key)
        if self.progress.has_begun(key):
            raise FencedError(f"{key} was refused: the update of this inner step has begun")
        with self.start_weights.of_step(key, self.policy.model, is_needed=keeps_start):
            return self._compute_log_prob(key, rows)

    def _compute_log_prob(self, key: CallKey, rows: Rows) -> tuple[Rows, dict[str, float]]:
        count = check_rows(rows, ["prompts", "responses", "response_mask"])
        started = time.perf_counter()
        old: list[torch.Tensor] = [torch.empty(0)] * count
        entropy: list[torch.Tensor] = [torch.empty(0)] * count
        limits = self.updater.limits
        for micro in micro_batches(rows, range(count), self.policy.packing, limits):
            responses = [rows["responses"][i] for i in micro]
            layout = self.policy.layout([rows["prompts"][i] for i in micro], responses)
            with torch.no_grad():
                found = self.policy.log_probs(layout, self.spec.temperature)
            lengths = [len(response) for response in responses]
            for column, values in zip((old, entropy), found, strict=True):
                for i, value in zip(micro, values.float().split(lengths), strict=True):
                    column[i] = value.clone()
        columns = {"old_log_probs": old, "entropy": entropy}
        metrics = _log_prob_metrics({**rows, **columns})
        metrics["perf/log_prob_seconds"] = time.perf_counter() - started
        return columns, metrics

    def update_actor(
        self, key: CallKey, rows: Rows, groups: Sequence[Hashable]
    ) -> dict[str, float]:
        """Make the optimizer steps of one inner step and return its metrics.

        Args:
            key: Names the inner step; a repeat returns the stored metrics.
            rows: Columns, see `PolicyUpdater.columns`.
            groups: Label (uid) of each row: mini-batches are whole groups.

        Raises:
            FencedError: an older caller, or a step older than one that was applied.
            DataError: a column is missing or malformed.
            NonFiniteLossError: too many steps in a row were not finite.
        """
        self._fence.admit(key)
        stored = self.progress.finished(key)
        if stored is not None:
            logger.info("%s: applied already, returning the stored metrics", key)
            return stored
        check_rows(rows, self.updater.columns)
        started = time.perf_counter()
        lr = self.spec.learning_rate.at(self.progress.num_inner_steps)
        for position, indices in enumerate(self._plan(key, groups)):
            if position >= self.progress.num_applied(key):
                self._optimizer_step(key, position, rows, indices, groups, lr)
        self.updater.release_gradients()
        metrics = _mean_metrics(self.progress.applied(key))
        metrics |= {
            "actor/lr": lr,
            "perf/update_seconds": time.perf_counter() - started,
        }
        return self.progress.finish(key, metrics)

    def publish_weights(self, key: CallKey, directory: str | Path, dtype: str) -> WeightMeta:
        """Write the weights to this worker's segment in `directory`.

        Args:
            key: Of the caller.
            directory: In shared memory.
            dtype: Type of the replicas' weights, torch's name.

        Raises:
            FencedError: an older caller.
            WeightSyncError: the segment cannot be written.
        """
        self._fence.admit(key)
        path = segment_path(directory, self.spec.run_id)
        named = self.policy.model.state_dict().items()
        # While it is written it holds nothing.
        self.published = None
        self.published = write_tensors(path, named, dtype, self.versions.current())
        return self.published

    def save_checkpoint(self, key: CallKey, folder: str | Path) -> None:
        """Write everything needed to go on from here to `folder`.

        Raises:
            FencedError: an older caller.
            CheckpointError: it cannot be written.
        """
        self._fence.admit(key)
        counters = {
            **self.progress.state_dict(),
            "weight_version": self.versions.current(),
            "skipped_versions": self.versions.skipped,
        }
        write_checkpoint(Path(folder), self.policy.model, self.updater.optimizer, counters)

    def load_checkpoint(self, key: CallKey, folder: str | Path) -> None:
        """Take over the state that `save_checkpoint` wrote.

        Raises:
            FencedError: an older caller.
            CheckpointError: incomplete, of a later format or of another model.
        """
        self._fence.admit(key)
        counters = read_checkpoint(Path(folder), self.policy.model, self.updater.optimizer)
        self.versions.restore(counters.pop("weight_version"), counters.pop("skipped_versions", ()))
        self.progress.load_state_dict(counters)

    def export_hf(self, key: CallKey, folder: str | Path) -> None:
        """Write the model and its tokenizer as an ordinary Hugging Face folder.

        Raises:
            FencedError: an older caller.
            CheckpointError: it cannot be written.
        """
        self._fence.admit(key)
        export_model(Path(folder), self.policy.model, Path(self.spec.model_path))

    def state(self) -> dict[str, Any]:
        """Return counters: what was applied last, weight version, packing, threads."""
        return {
            "applied": self.progress.last_finished,
            "inner_steps": self.progress.num_inner_steps,
            "nonfinite_steps": self.progress.num_nonfinite,
            "weight_version": self.versions.present,
            "skipped_versions": self.versions.skipped,
            "packing": self.policy.packing,
            "num_threads": torch.get_num_threads(),
        }

    def _plan(self, key: CallKey, groups: Sequence[Hashable]) -> list[list[int]]:
        """Row indices of every optimizer step of the inner step; the same for a repeat."""
        plan: list[list[int]] = []
        for epoch in range(self.spec.ppo_epochs):
            seed = None
            if self.spec.shuffle:
                place = (key.global_step * 1_000 + key.inner_step) * 1_000 + epoch
                seed = self.spec.shuffle_seed * 1_000_003 + place
            plan += mini_batches(groups, self.spec.mini_batch_groups, shuffle_seed=seed)
        return plan

    def _optimizer_step(
        self,
        key: CallKey,
        position: int,
        rows: Rows,
        indices: list[int],
        groups: Sequence[Hashable],
        lr: float,
    ) -> None:
        outcome = self.updater.step(rows, indices, lr)
        self.progress.apply(key, outcome.metrics, is_skipped=outcome.is_skipped)
        if not outcome.is_skipped:
            self.versions.state_changed()
            return
        uids = sorted({str(groups[i]) for i in outcome.nonfinite_rows})
        path = self._dump(key, position, rows, outcome.nonfinite_rows, groups)
        message = (
            f"step {key.global_step}.{key.inner_step} optimizer step {position}: loss or gradient "
            f"is not finite in {len(outcome.nonfinite_rows)} trajectories of prompts "
            f"{', '.join(uids)}; the step was skipped, its rows are in {path}"
        )
        logger.error(message)
        if self.progress.num_nonfinite >= self.spec.max_nonfinite_steps:
            raise NonFiniteLossError(
                f"{message}; it was number {self.progress.num_nonfinite} in a row "
                "(trainer.max_nonfinite_steps): lower the learning rate or look at these rows"
            )

    def _dump(
        self,
        key: CallKey,
        position: int,
        rows: Rows,
        indices: list[int],
        groups: Sequence[Hashable],
    ) -> Path:
        folder = Path(self.spec.folder) / "nonfinite"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"step-{key.global_step:04d}.{key.inner_step}-optimizer-{position}.pt"
        content: dict[str, Any] = {
            name: [values[i].clone() for i in indices] for name, values in rows.items()
        }
        content["groups"] = [str(groups[i]) for i in indices]
        torch.save(content, path)
        return path


def _log_prob_metrics(rows: Rows) -> dict[str, float]:
    names = ("response_mask", "old_log_probs", "entropy", "rollout_log_probs")
    padded = {n: pad_sequence(rows[n], batch_first=True) for n in names if n in rows}
    mask = padded["response_mask"]
    metrics = {"actor/entropy": masked_mean(padded["entropy"], mask).item()}
    if "rollout_log_probs" in padded:
        gap = offpolicy_metrics(padded["old_log_probs"], padded["rollout_log_probs"], mask)
        for name, value in gap.items():
            is_difference = name.startswith("probs_diff")
            prefix = "training/rollout_" if is_difference else "rollout_corr/"  # as verl
            metrics[prefix + name] = value
    return metrics


def _mean_metrics(applied: list[dict[str, float]]) -> dict[str, float]:
    """Mean over the optimizer steps that have the metric; counters are summed."""
    names = {name for metrics in applied for name in metrics}
    values = {name: [m[name] for m in applied if name in m] for name in sorted(names)}
    return {
        f"actor/{name}": sum(found) / (1 if name in SUMMED else len(found))
        for name, found in values.items()
    }
