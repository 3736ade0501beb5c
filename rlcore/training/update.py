"""The policy's loss for a micro-batch: policy loss, entropy, KL from reference and teacher.

Legend: B rows (trajectories) of a micro-batch, T response positions.
"""

from typing import Any

import torch
from torch import Tensor

from rlcore.algorithms import (
    POLICY_LOSSES,
    PolicyLossInputs,
    agg_loss,
    drop_drifted,
    drop_rejected,
    kl_estimate,
)
from rlcore.training.batches import Rows
from rlcore.training.distillation import TEACHER_COLUMN
from rlcore.training.policy import Policy
from rlcore.training.ranks import Ranks
from rlcore.training.spec import TrainingSpec
from rlcore.training.steps import Updater, nonfinite_rows, padded

# What every update reads; PolicyUpdater.columns adds what its loss and corrections need.
LOSS_COLUMNS = ("prompts", "responses", "response_mask", "old_log_probs", "advantages")
REFERENCE_COLUMN = "ref_log_prob"


class PolicyUpdater(Updater):
    """Makes optimizer steps on a policy.

    Trajectories whose advantages are all 0 take no part in the backward pass where the loss says
    that their gradient is 0 (a group whose rewards are equal teaches nothing, and there are many of
    them); they still count in the step's totals. The metrics of the loss (clip fractions, ppo_kl)
    are means over the tokens that are trained on.
    """

    always_reported = ("pg_loss", "entropy_loss")

    def __init__(self, policy: Policy, spec: TrainingSpec, ranks: Ranks | None = None) -> None:
        super().__init__(policy, spec.optimizer, ranks or Ranks())
        self._spec = spec
        self._loss = POLICY_LOSSES.get(spec.loss_mode)
        self.columns = self._wanted_columns()

    def _wanted_columns(self) -> tuple[str, ...]:
        extra = {
            "rollout_log_probs": "rollout_logp" in self._loss.needs,
            "rollout_is_weights": self._spec.has_is_weights,
            "train_mask": self._spec.has_train_mask,
            REFERENCE_COLUMN: self._spec.kl_loss is not None,
            TEACHER_COLUMN: self._spec.distillation is not None,
        }
        return (*LOSS_COLUMNS, *(name for name, is_wanted in extra.items() if is_wanted))

    def _prepared(self, rows: Rows) -> Rows:
        if self._spec.has_train_mask:
            # Loss and totals count what rollout correction left.
            return {**rows, "response_mask": rows["train_mask"]}
        return rows

    def _teaches(self, rows: Rows, index: int) -> bool:
        spec = self._spec
        has_other_terms = spec.entropy_coeff or spec.kl_loss is not None or spec.distillation
        can_skip = self._loss.is_silent_without_advantage and not has_other_terms
        mask = rows["response_mask"][index].bool()
        if not can_skip:
            return bool(mask.any())
        return bool((rows["advantages"][index][mask] != 0).any())

    def _accumulate(
        self,
        rows: Rows,
        micro: list[int],
        totals: dict[str, Any],
        sums: dict[str, float],
        num_tokens: int,
    ) -> list[int]:
        logp, entropy = self._forward(rows, micro, self._spec.temperature)
        mask = padded(rows, "response_mask", micro)
        inputs = self._inputs(rows, micro, logp, mask)
        policy_loss, metrics = self._loss(
            inputs, agg_kw=self._aggregation(totals), **self._spec.loss_settings
        )
        terms, loss = {"pg_loss": policy_loss}, policy_loss
        parts = logp + inputs.old_logp + inputs.adv + entropy
        distillation = self._spec.distillation
        if distillation is not None:
            teacher = padded(rows, TEACHER_COLUMN, micro)
            parts = parts + teacher
            distilled, told = distillation.term(inputs, mask, teacher, self._aggregation(totals))
            terms["distillation/loss"], metrics = distilled, metrics | told
            rewarded = policy_loss if distillation.has_task_loss else 0.0
            loss = rewarded + distillation.coef * distilled
        if self._spec.entropy_coeff:
            terms["entropy_loss"] = self._aggregated(entropy, mask, totals)
            loss = loss - self._spec.entropy_coeff * terms["entropy_loss"]
        if self._spec.kl_loss is not None:
            reference = padded(rows, REFERENCE_COLUMN, micro)
            parts = parts + reference
            kl = kl_estimate(logp, reference, mask, **self._spec.kl_loss)
            terms["kl_loss"] = self._aggregated(kl, mask, totals)
            loss = loss + self._spec.kl_loss_coef * terms["kl_loss"]
        loss.backward()
        if not torch.isfinite(loss):
            return nonfinite_rows(parts, mask, micro)
        share = mask.bool().sum().item() / num_tokens
        found = {name: term.item() for name, term in terms.items()}
        found |= {name: share * value for name, value in metrics.items()}
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + value
        return []

    def _inputs(self, rows: Rows, micro: list[int], logp: Tensor, mask: Tensor) -> PolicyLossInputs:
        def optional(name: str) -> Tensor | None:
            return padded(rows, name, micro) if name in self.columns else None

        inputs = PolicyLossInputs(
            old_logp=padded(rows, "old_log_probs", micro),
            logp=logp,
            adv=padded(rows, "advantages", micro),
            mask=mask,
            is_weights=optional("rollout_is_weights"),
            rollout_logp=optional("rollout_log_probs"),
        )
        inputs = drop_rejected(inputs, self._spec.rejections)
        delta = self._spec.off_policy_delta
        return inputs if delta is None else drop_drifted(inputs, delta)

    def _aggregated(self, values: Tensor, mask: Tensor, totals: dict[str, Any]) -> Tensor:
        return agg_loss(values, mask, self._spec.loss_agg_mode, **self._aggregation(totals))

    def _aggregation(self, totals: dict[str, Any]) -> dict[str, Any]:
        return {**totals, "loss_scale_factor": self._spec.loss_scale_factor}
