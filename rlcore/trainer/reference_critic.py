"""The phases of reference, teacher and critic, and the weight of a KL penalty in the reward.

A part of `PPOTrainer`: what a configuration does not ask for is no phase of its steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlcore.algorithms import adaptive_kl_update, kl_in_reward
from rlcore.cluster.training_worker import TrainingGroup
from rlcore.config import RunConfig
from rlcore.config.arguments import arguments
from rlcore.types import BatchRef, CallKey, SampledBatch

Metrics = dict[str, float]
KL_STATE = "kl_in_reward"
"""Where the controller's weight is in `PPOTrainer.state`, which every checkpoint holds."""
KL_METRIC = "actor/reward_kl_penalty"


@dataclass(frozen=True, kw_only=True, slots=True)
class KLPenalty:
    """A KL from the reference, taken off the rewards."""

    beta: float
    kind: Any

    def __call__(
        self, columns: Mapping[str, Tensor], scores: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Metrics]:
        """Return rewards per token and outcome per row after the penalty, and its metrics.

        Args:
            columns: rm_scores, old_log_probs and ref_log_prob, [B, T].
            scores: Outcome of each row, [B].
            mask: Valid tokens.
        """
        given = columns["rm_scores"]
        rewards, kl = kl_in_reward(
            given, columns["old_log_probs"], columns["ref_log_prob"], mask, self.beta, self.kind
        )
        taken = torch.where(mask.bool(), given - rewards, 0.0).sum(-1)
        penalised = scores - taken
        found = penalised[torch.isfinite(penalised)]
        metrics = {KL_METRIC: float(kl), "actor/reward_kl_penalty_coeff": self.beta}
        if found.numel():
            metrics |= {
                f"critic/rewards/{kind}": float(getattr(found, kind)())
                for kind in ("mean", "max", "min")
            }
        return rewards, penalised, metrics


def kl_penalty(config: RunConfig, state: Mapping[str, Any]) -> KLPenalty | None:
    """Return the penalty with the weight that the controller has reached; None: none is asked."""
    if not config.algorithm.use_kl_in_reward:
        return None
    given = arguments(config, "kl_in_reward")
    kept = state.get(KL_STATE)
    return KLPenalty(beta=kept["beta"] if kept else given["beta"], kind=given["kind"])


def move_kl_weight(
    config: RunConfig, state: dict[str, Any], key: CallKey, metrics: Metrics, num_rows: int
) -> None:
    """Let the adaptive controller see a batch's KL, once for each inner step."""
    if not config.algorithm.use_kl_in_reward or config.algorithm.kl_ctrl.type == "fixed":
        return
    place = [key.global_step, key.inner_step]
    kept = state.get(KL_STATE)
    if kept is not None and kept["place"] >= place:
        return
    beta = adaptive_kl_update(
        metrics["actor/reward_kl_penalty_coeff"],
        metrics[KL_METRIC],
        n_steps=num_rows,
        **arguments(config, "adaptive_kl_update"),
    )
    state[KL_STATE] = {"beta": beta, "place": place}


class ReferenceAndCritic(ABC):
    """Phases that a configuration may ask for; `PPOTrainer` has what they use."""

    config: RunConfig
    global_steps: int
    training: TrainingGroup
    deadline_s: float

    def idle_phases(self) -> frozenset[str]:
        """Return the methods that are no phases of this configuration's steps."""
        idle: set[str] = set()
        if not self.config.needs_reference:
            idle.add("_compute_ref_log_prob")
        if self.config.teacher_path is None:
            idle.add("_compute_teacher_log_prob")
        if not self.config.needs_critic:
            idle |= {"_compute_values", "_update_critic"}
        return frozenset(idle)

    @property
    def is_warming_up(self) -> bool:
        """Whether the critic alone is trained in this step (verl: `critic_warmup` > step)."""
        return self.config.needs_critic and self.config.trainer.critic_warmup > self.global_steps

    def _compute_ref_log_prob(self, batch: BatchRef) -> Metrics:
        """Write `ref_log_prob` of the batch under the frozen reference."""
        return self.training.with_deadline(self.deadline_s).compute_ref_log_prob(
            self._key(), self._partition("train"), self._leased(batch)
        )

    def _compute_teacher_log_prob(self, batch: BatchRef) -> Metrics:
        """Write `teacher_logprobs` of the batch under the teacher, whatever weights sampled it."""
        return self.training.with_deadline(self.deadline_s).compute_teacher_log_prob(
            self._key(), self._partition("train"), self._leased(batch)
        )

    def _compute_values(self, batch: BatchRef) -> Metrics:
        """Write `values` of the batch under the critic's present weights."""
        return self.training.with_deadline(self.deadline_s).compute_values(
            self._key(), self._partition("train"), self._leased(batch)
        )

    def _update_critic(self, batch: BatchRef) -> Metrics:
        """Make the critic's optimizer steps; each is applied once, however often this runs."""
        return self.training.with_deadline(self.deadline_s).update_critic(
            self._key(), self._partition("train"), self._leased(batch)
        )

    @abstractmethod
    def _key(self) -> CallKey:
        """Return the key of the phase that runs."""

    @abstractmethod
    def _partition(self, name: str) -> str:
        """Return the name of one of this run's partitions."""

    @abstractmethod
    def _leased(self, batch: BatchRef) -> SampledBatch:
        """Return the batch with its rows' keys."""
