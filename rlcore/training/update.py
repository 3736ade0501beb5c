"""One optimizer step: loss and gradient over micro-batches, clipping, AdamW, non-finite rule.

Legend: B rows (trajectories) of a micro-batch, T response positions, M response tokens.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlcore.algorithms import (
    POLICY_LOSSES,
    PolicyLossInputs,
    agg_loss,
    drop_drifted,
    drop_rejected,
)
from rlcore.training.batches import MicroBatchLimits, Rows, micro_batches
from rlcore.training.policy import Policy
from rlcore.training.spec import TrainingSpec

logger = logging.getLogger(__name__)

# What every update reads; PolicyUpdater.columns adds what its loss and corrections need.
LOSS_COLUMNS = ("prompts", "responses", "response_mask", "old_log_probs", "advantages")


@dataclass(kw_only=True, slots=True)
class StepOutcome:
    """What an optimizer step did."""

    metrics: dict[str, float]
    nonfinite_rows: list[int]
    """Rows whose loss was not finite, or all of them where only the gradient was not."""

    @property
    def is_skipped(self) -> bool:
        """Whether the weights were left as they were."""
        return bool(self.nonfinite_rows)


class PolicyUpdater:
    """Makes optimizer steps on a policy.

    The sum of the micro-batches' losses is the loss of the whole optimizer step: each is divided
    by the totals of the step. Trajectories whose advantages are all 0 take no part in the backward
    pass where the loss says that their gradient is 0 (a group whose rewards are equal teaches
    nothing, and there are many of them); they still count in those totals. The metrics of the loss
    (clip fractions, ppo_kl) are means over the tokens that are trained on.
    """

    def __init__(self, policy: Policy, spec: TrainingSpec) -> None:
        self._policy = policy
        self._spec = spec
        self._loss = POLICY_LOSSES.get(spec.loss_mode)
        self.columns = self._wanted_columns()
        self._parameters = [p for p in policy.model.parameters() if p.requires_grad]
        self.limits = MicroBatchLimits(
            max_rows=spec.micro_batch_rows, max_tokens=spec.micro_batch_tokens
        )
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=spec.learning_rate.at(0),
            betas=spec.betas,
            weight_decay=spec.weight_decay,
            fused=True,
        )

    def step(self, rows: Rows, indices: Sequence[int], lr: float) -> StepOutcome:
        """Make one optimizer step on the rows `indices`, or none if a number is not finite."""
        if self._spec.has_train_mask:
            # Loss and totals count what rollout correction left.
            rows = {**rows, "response_mask": rows["train_mask"]}
        self.optimizer.zero_grad(set_to_none=True)
        totals = _totals(rows, indices)
        trained = [i for i in indices if self._teaches(rows, i)]
        sums: dict[str, float] = {"pg_loss": 0.0, "entropy_loss": 0.0}
        num_tokens = max(_totals(rows, trained)["batch_num_tokens"], 1)
        for micro in micro_batches(rows, trained, self._policy.packing, self.limits):
            bad = self._accumulate(rows, micro, totals, sums, num_tokens)
            if bad:
                return StepOutcome(metrics=sums, nonfinite_rows=bad)
        norm = self._clip()
        if not torch.isfinite(norm):
            return StepOutcome(metrics=sums, nonfinite_rows=list(indices))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        sums |= {
            "grad_norm": norm.item(),
            "trained_trajectories": float(len(trained)),
        }
        return StepOutcome(metrics=sums, nonfinite_rows=[])

    def _wanted_columns(self) -> tuple[str, ...]:
        extra = {
            "rollout_log_probs": "rollout_logp" in self._loss.needs,
            "rollout_is_weights": self._spec.has_is_weights,
            "train_mask": self._spec.has_train_mask,
        }
        return (*LOSS_COLUMNS, *(name for name, is_wanted in extra.items() if is_wanted))

    def release_gradients(self) -> None:
        """Free the gradients' memory until the next step."""
        self.optimizer.zero_grad(set_to_none=True)

    def _teaches(self, rows: Rows, index: int) -> bool:
        can_skip = self._loss.is_silent_without_advantage and not self._spec.entropy_coeff
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
        """Add a micro-batch's gradient and metrics; return its rows of non-finite loss, if any."""
        logp, entropy = self._forward(rows, micro)
        mask = _column(rows, "response_mask", micro)
        inputs = self._inputs(rows, micro, logp, mask)
        policy_loss, metrics = self._loss(
            inputs, agg_kw=self._aggregation(totals), **self._spec.loss_settings
        )
        loss = policy_loss
        if self._spec.entropy_coeff:
            bonus = agg_loss(entropy, mask, self._spec.loss_agg_mode, **self._aggregation(totals))
            loss = policy_loss - self._spec.entropy_coeff * bonus
            sums["entropy_loss"] += bonus.item()
        if not torch.isfinite(loss):
            return _nonfinite_rows(inputs, entropy, micro)
        loss.backward()
        sums["pg_loss"] += policy_loss.item()
        share = mask.bool().sum().item() / num_tokens
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + share * value
        return []

    def _forward(self, rows: Rows, micro: list[int]) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy of a micro-batch, both [B, T]."""
        prompts = [rows["prompts"][i] for i in micro]
        responses = [rows["responses"][i] for i in micro]
        layout = self._policy.layout(prompts, responses)
        logp, entropy = self._policy.log_probs(layout, self._spec.temperature)
        lengths = [len(response) for response in responses]
        return (
            pad_sequence(list(logp.split(lengths)), batch_first=True),
            pad_sequence(list(entropy.split(lengths)), batch_first=True),
        )

    def _inputs(self, rows: Rows, micro: list[int], logp: Tensor, mask: Tensor) -> PolicyLossInputs:
        def optional(name: str) -> Tensor | None:
            return _column(rows, name, micro) if name in self.columns else None

        inputs = PolicyLossInputs(
            old_logp=_column(rows, "old_log_probs", micro),
            logp=logp,
            adv=_column(rows, "advantages", micro),
            mask=mask,
            is_weights=optional("rollout_is_weights"),
            rollout_logp=optional("rollout_log_probs"),
        )
        inputs = drop_rejected(inputs, self._spec.rejections)
        delta = self._spec.off_policy_delta
        return inputs if delta is None else drop_drifted(inputs, delta)

    def _aggregation(self, totals: dict[str, Any]) -> dict[str, Any]:
        return {**totals, "loss_scale_factor": self._spec.loss_scale_factor}

    def _clip(self) -> Tensor:
        for parameter in self._parameters:
            if parameter.grad is None:
                # No row taught anything: AdamW still decays its moments, as for a gradient of 0.
                parameter.grad = torch.zeros_like(parameter)
        return torch.nn.utils.clip_grad_norm_(self._parameters, self._spec.grad_clip)


def _column(rows: Rows, name: str, micro: list[int]) -> Tensor:
    return pad_sequence([rows[name][i] for i in micro], batch_first=True)


def _totals(rows: Rows, indices: Sequence[int]) -> dict[str, Any]:
    valid = [int(rows["response_mask"][i].bool().sum()) for i in indices]
    return {
        "batch_num_tokens": sum(valid),
        "global_batch_size": sum(count > 0 for count in valid),
    }


@torch.no_grad()
def _nonfinite_rows(inputs: PolicyLossInputs, entropy: Tensor, micro: list[int]) -> list[int]:
    parts = inputs.logp + inputs.old_logp + inputs.adv + entropy
    is_bad = (~torch.isfinite(parts) & inputs.mask.bool()).any(-1)
    found = [row for row, bad in zip(micro, is_bad.tolist(), strict=True) if bad]
    return found or micro
