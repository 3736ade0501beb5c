"""The training worker, one per rank: log-probs, values, updates, publication and checkpoints.

A plain object without Ray or queue: columns in, columns out. It holds the policy, and what the run
asks for besides: a frozen reference, a teacher, a critic.
"""

import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlcore.checkpoint_engine.segment import write_tensors
from rlcore.checkpoint_engine.segment_file import segment_path
from rlcore.errors import ConfigError, FencedError
from rlcore.fencing import Fence
from rlcore.training import log_prob_metrics
from rlcore.training.balance import Share, shares
from rlcore.training.batches import Rows, check_rows
from rlcore.training.checkpoint import (
    export_model,
    read_checkpoint,
    trained_state,
    write_checkpoint,
)
from rlcore.training.columns import computed_columns
from rlcore.training.critic import Critic
from rlcore.training.distillation import TEACHER_COLUMN
from rlcore.training.lora import adapter_tensors, merged_tensors
from rlcore.training.policy import Policy
from rlcore.training.progress import Progress
from rlcore.training.ranks import Ranks, summed
from rlcore.training.spec import TrainingSpec
from rlcore.training.start_weights import StartWeights
from rlcore.training.trainee import Trainee
from rlcore.training.update import REFERENCE_COLUMN, PolicyUpdater
from rlcore.training.versions import WeightVersions
from rlcore.types import CallKey, WeightMeta

FORWARD_COLUMNS = ("prompts", "responses", "response_mask")
CRITIC = "critic"
"""Folder of the critic's part of a checkpoint, beside the policy's."""


class TrainingWorker:
    """Holds the models of one rank; see the module.

    Example:
        >>> worker = TrainingWorker(spec)
        >>> rows |= worker.compute_log_prob(key, rows)[0]
        >>> metrics = worker.update_actor(key, rows, groups=uids)
        >>> meta = worker.publish_weights(key, "/dev/shm", "bfloat16")
    """

    def __init__(self, spec: TrainingSpec, ranks: Ranks | None = None) -> None:
        self.spec = spec
        self.ranks = ranks or Ranks()
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
            ranks=self.ranks,
            lora=spec.lora,
            gradient_checkpointing=spec.gradient_checkpointing,
        )
        self.reference = self._load_reference()
        distillation = spec.distillation
        self.teacher = None if distillation is None else self._frozen(distillation.teacher_path)
        self.updater = PolicyUpdater(self.policy, spec, self.ranks)
        self.versions = WeightVersions(Path(spec.folder) / "weight_version")
        self.actor = Trainee(
            "actor",
            self.updater,
            spec.plan,
            folder=Path(spec.folder),
            ranks=self.ranks,
            on_change=self.versions.state_changed,
        )
        self.critic = None if spec.critic is None else Critic(spec, spec.critic, self.ranks)
        self.start_weights = StartWeights()
        self.published: WeightMeta | None = None
        """What the segment holds."""
        self._fence = Fence(spec.run_id, spec.attempt)

    def _load_reference(self) -> Policy | None:
        """Load the frozen model; below adapters the policy has it already."""
        spec = self.spec
        is_below_adapters = spec.lora is not None and spec.reference_path is None
        if not spec.has_reference or is_below_adapters:
            return None
        return self._frozen(spec.reference_path or spec.model_path)

    def _frozen(self, path: str) -> Policy:
        spec = self.spec
        model = Policy(
            path,
            dtype=spec.dtype,
            packing=spec.packing,
            trust_remote_code=spec.trust_remote_code,
            ranks=self.ranks,
        )
        model.freeze()
        return model

    @property
    def progress(self) -> Progress:
        """Which optimizer steps of the policy were applied."""
        return self.actor.progress

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
        check_rows(rows, FORWARD_COLUMNS)
        with self.start_weights.of_step(key, self.policy.model, is_needed=keeps_start):
            return self._compute_log_prob(rows)

    def _compute_log_prob(self, rows: Rows) -> tuple[Rows, dict[str, float]]:
        started = time.perf_counter()
        columns = self._columns(
            self.policy,
            rows,
            ["old_log_probs", "entropy"],
            lambda layout: self.policy.log_probs(layout, self.spec.temperature),
        )
        metrics = log_prob_metrics.policy_metrics(self._compared(rows, columns))
        metrics["perf/log_prob_seconds"] = time.perf_counter() - started
        return columns, metrics

    def _compared(self, rows: Rows, columns: Rows) -> Rows:
        return summed(self.ranks.gather(log_prob_metrics.compared(rows, columns)))

    def compute_ref_log_prob(self, key: CallKey, rows: Rows) -> Rows:
        """Return the column `ref_log_prob` under the frozen reference.

        Raises:
            FencedError: an older caller.
            DataError: a column is missing or malformed.
            ConfigError: the run has no reference.
        """
        self._fence.admit(key)
        check_rows(rows, FORWARD_COLUMNS)
        if not self.spec.has_reference:
            raise ConfigError("this run has no reference model: nothing in it asks for a KL")
        reference = self.reference
        if reference is None:
            return self._columns(
                self.policy,
                rows,
                [REFERENCE_COLUMN],
                lambda layout: self.policy.base_log_probs(layout, self.spec.temperature),
            )
        return self._columns(
            reference,
            rows,
            [REFERENCE_COLUMN],
            lambda layout: reference.log_probs(layout, self.spec.temperature)[:1],
        )

    def compute_teacher_log_prob(self, key: CallKey, rows: Rows) -> tuple[Rows, dict[str, float]]:
        """Return the column `teacher_logprobs` of the sampled tokens, and how far the policy is.

        The teacher's distribution is over the rows of its own vocabulary, which may be more or
        fewer than the policy's where both are padded beyond the ids of their one tokenizer (Qwen's
        sizes differ so): padding has next to no probability in a trained model. It is scaled by the
        temperature of sampling, as the policy's and the reference's are.

        Args:
            key: Of the caller.
            rows: Columns; with `old_log_probs` the metrics tell the mean KL to the teacher.

        Raises:
            FencedError: an older caller.
            DataError: a column is missing or malformed, or a token has no row in the teacher.
            ConfigError: the run has no teacher.
        """
        self._fence.admit(key)
        check_rows(rows, FORWARD_COLUMNS)
        teacher = self.teacher
        if teacher is None:
            raise ConfigError("this run has no teacher: nothing in it is distilled")
        log_prob_metrics.check_vocabulary(teacher, rows)
        columns = self._columns(
            teacher,
            rows,
            [TEACHER_COLUMN],
            lambda layout: teacher.log_probs(layout, self.spec.temperature)[:1],
        )
        return columns, log_prob_metrics.teacher_metrics(self._compared(rows, columns))

    def compute_values(self, key: CallKey, rows: Rows) -> tuple[Rows, dict[str, float]]:
        """Return the column `values` under the critic's present weights, and the time it took.

        Raises:
            FencedError: an older caller, or the critic's update of this inner step has begun.
            DataError: a column is missing or malformed.
            ConfigError: the run has no critic.
        """
        self._fence.admit(key)
        critic = self._present_critic()
        if critic.trainee.progress.has_begun(key):
            raise FencedError(f"{key} was refused: the critic's update of this step has begun")
        check_rows(rows, FORWARD_COLUMNS)
        started = time.perf_counter()
        limits = critic.spec.forward_limits
        (values,) = computed_columns(
            critic.model, rows, limits, self.ranks, lambda layout: (critic.model.values(layout),)
        ) or [[]]
        return {"values": values}, {"perf/values_seconds": time.perf_counter() - started}

    def update_critic(
        self,
        key: CallKey,
        rows: Rows,
        groups: Sequence[Hashable],
        steps: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, float]:
        """Make the critic's optimizer steps of one inner step; arguments as of `update_actor`.

        Raises:
            FencedError, DataError, NonFiniteLossError, RankDisagreementError: see Trainee.update.
            ConfigError: the run has no critic.
        """
        self._fence.admit(key)
        return self._present_critic().trainee.update(key, rows, groups, steps)

    def share(
        self, key: CallKey, groups: Sequence[Hashable], lengths: Sequence[int], *, of: str = "actor"
    ) -> Share:
        """Return which rows of the batch this rank needs for an update, and in which step.

        Args:
            key: Names the inner step.
            groups: Label (uid) of each row of the whole batch.
            lengths: Tokens of each, prompt included.
            of: "actor" or "critic".
        """
        trainee = self.actor if of == "actor" else self._present_critic().trainee
        steps = trainee.plan.steps(key, groups)
        return shares(steps, groups, lengths, self.ranks.size)[self.ranks.rank]

    def update_actor(
        self,
        key: CallKey,
        rows: Rows,
        groups: Sequence[Hashable],
        steps: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, float]:
        """Make the policy's optimizer steps of one inner step and return its metrics.

        Args:
            key: Names the inner step; a repeat returns the stored metrics.
            rows: Columns, see `PolicyUpdater.columns`.
            groups: Label (uid) of each row: mini-batches are whole groups.
            steps: Row numbers of each optimizer step, this rank's (see `share`); None: of one rank
                that has the whole batch.

        Raises:
            FencedError, DataError, NonFiniteLossError, RankDisagreementError: see Trainee.update.
        """
        self._fence.admit(key)
        return self.actor.update(key, rows, groups, steps)

    def publish_weights(self, key: CallKey, directory: str | Path, dtype: str) -> WeightMeta | None:
        """Write the weights to the run's segment in `directory`; rank 0 does, and says what.

        Args:
            key: Of the caller.
            directory: In shared memory.
            dtype: Type of the replicas' weights, torch's name. Adapters that are published alone
                keep theirs: they are small, and merged before anything is rounded.

        Raises:
            FencedError: an older caller.
            WeightSyncError: the segment cannot be written.
        """
        self._fence.admit(key)
        version = self._agreed_version()
        lora = self.spec.lora
        scale = None if lora is None or lora.merge else lora.alpha / lora.rank
        if scale is None:
            named = merged_tensors(self.policy.model, getattr(torch, dtype))
        else:
            named, dtype = adapter_tensors(self.policy.model), "auto"
        if not self.ranks.is_first:
            deque(named, maxlen=0)  # this rank's shards are asked for
            return None
        path = segment_path(directory, self.spec.run_id)
        # While it is written it holds nothing.
        self.published = None
        written = write_tensors(path, named, dtype, version)
        self.published = replace(written, adapter_scale=scale)
        return self.published

    def save_checkpoint(self, key: CallKey, folder: str | Path) -> None:
        """Write everything needed to go on from here to `folder`.

        Raises:
            FencedError: an older caller.
            CheckpointError: it cannot be written.
        """
        self._fence.admit(key)
        version = self._agreed_version()
        counters = {
            **self.progress.state_dict(),
            "weight_version": version,
            "skipped_versions": self.versions.skipped,
        }
        state = trained_state(self.policy.model, self.updater.optimizer)
        write_checkpoint(Path(folder), state, counters, self.ranks)
        if self.critic is not None:
            self.critic.save(Path(folder) / CRITIC, self.ranks)

    def load_checkpoint(self, key: CallKey, folder: str | Path) -> None:
        """Take over the state that `save_checkpoint` wrote, on any number of ranks.

        Raises:
            FencedError: an older caller.
            CheckpointError: incomplete, of a later format or of another model.
        """
        self._fence.admit(key)
        counters = read_checkpoint(
            Path(folder), self.policy.model, self.updater.optimizer, self.ranks
        )
        self.versions.restore(counters.pop("weight_version"), counters.pop("skipped_versions", ()))
        self.progress.load_state_dict(counters)
        if self.critic is not None:
            self.critic.load(Path(folder) / CRITIC, self.ranks)

    def export_hf(self, key: CallKey, folder: str | Path) -> None:
        """Write the model and its tokenizer as an ordinary Hugging Face folder.

        Raises:
            FencedError: an older caller.
            CheckpointError: it cannot be written.
        """
        self._fence.admit(key)
        export_model(Path(folder), self.policy.model, Path(self.spec.model_path), self.ranks)

    def _agreed_version(self) -> int:
        """Return the version of the present weights; rank 0 numbers them."""
        own = self.versions.current() if self.ranks.is_first else None
        version = self.ranks.gather(own)[0]
        assert version is not None
        if not self.ranks.is_first:
            self.versions.restore(version)
        return version

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

    def _columns(
        self, model: Policy, rows: Rows, names: list[str], forward: Any
    ) -> dict[str, list[torch.Tensor]]:
        found = computed_columns(model, rows, self.spec.limits, self.ranks, forward)
        return dict(zip(names, found or [[] for _ in names], strict=True))

    def _present_critic(self) -> Critic:
        if self.critic is None:
            raise ConfigError("this run has no critic: nothing in it asks for values")
        return self.critic
