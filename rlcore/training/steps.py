"""One optimizer step: gradient over micro-batches and ranks, clipping, AdamW, non-finite rule.

What policy and critic share. All ranks make the same passes in the same order, since shards are
gathered and gradients summed in them; where one has a micro-batch less it makes an idle pass.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlcore.training.batches import Rows, in_lockstep, micro_batches
from rlcore.training.plan import OptimizerSpec
from rlcore.training.ranks import Ranks, summed
from rlcore.training.row_model import RowModel
from rlcore.training.sharding import sum_gradients_at_end, whole


@dataclass(kw_only=True, slots=True)
class StepOutcome:
    """What an optimizer step did."""

    metrics: dict[str, float]
    """Of all ranks."""
    nonfinite_rows: list[int]
    """This rank's rows whose loss was not finite; all of them where only the gradient was not."""
    is_skipped: bool
    """Whether the weights were left as they were, on every rank."""


class Updater(ABC):
    """Makes optimizer steps on a model.

    The sum of the micro-batches' losses, over all ranks, is the loss of the whole optimizer step:
    each is divided by the totals of the step.
    """

    always_reported: tuple[str, ...] = ()
    """Metrics that are 0 where no row teaches."""

    def __init__(self, model: RowModel, spec: OptimizerSpec, ranks: Ranks) -> None:
        self.model = model
        self.limits = spec.limits
        self._ranks = ranks
        self._grad_clip = spec.grad_clip
        self._parameters = [p for p in model.net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=0.0,  # set by every step
            betas=spec.betas,
            weight_decay=spec.weight_decay,
            fused=True,
        )

    def _prepared(self, rows: Rows) -> Rows:
        """Return the rows as loss and totals see them."""
        return rows

    @abstractmethod
    def _teaches(self, rows: Rows, index: int) -> bool:
        """Whether a row takes part in the backward pass; it counts in the totals all the same."""

    @abstractmethod
    def _accumulate(
        self,
        rows: Rows,
        micro: list[int],
        totals: dict[str, Any],
        sums: dict[str, float],
        num_tokens: int,
    ) -> list[int]:
        """Add a micro-batch's gradient and metrics; return its rows of non-finite loss, if any.

        The backward pass is made in any case: other ranks wait for this one's part.

        Args:
            rows: This rank's.
            micro: Which of them.
            totals: Valid tokens and rows of the optimizer step, of all ranks (see `agg_loss`).
            sums: Metrics so far; what is added must sum up to the step's value.
            num_tokens: Tokens that take part in the backward pass, of all ranks.
        """

    def step(self, rows: Rows, indices: Sequence[int], lr: float) -> StepOutcome:
        """Make one optimizer step on this rank's rows `indices`, or none if a number is not finite.

        Every rank calls it, be its rows none.
        """
        rows = self._prepared(rows)
        self.optimizer.zero_grad(set_to_none=True)
        trained = [i for i in indices if self._teaches(rows, i)]
        micros = list(micro_batches(rows, trained, self.model.packing, self.limits))
        plans = self._ranks.gather((_totals(rows, indices), _totals(rows, trained), len(micros)))
        totals = summed(plan[0] for plan in plans)
        num_tokens = max(summed(plan[1] for plan in plans)["batch_num_tokens"], 1)
        sums = dict.fromkeys(self.always_reported, 0.0)
        bad: list[int] = []
        for micro, is_last in in_lockstep(micros, max(plan[2] for plan in plans)):
            sum_gradients_at_end(self.model.net, is_end=is_last)
            if micro:
                bad += self._accumulate(rows, micro, totals, sums, num_tokens)
            else:
                self.model.idle_pass(backward=True)
        sums["trained_trajectories"] = float(len(trained))
        ends = self._ranks.gather((sums, len(bad)))
        metrics = summed(end[0] for end in ends)
        if any(end[1] for end in ends):
            return StepOutcome(metrics=metrics, nonfinite_rows=bad, is_skipped=True)
        norm = self._clip()
        if not torch.isfinite(norm):
            return StepOutcome(metrics=metrics, nonfinite_rows=list(indices), is_skipped=True)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        metrics["grad_norm"] = norm.item()
        return StepOutcome(metrics=metrics, nonfinite_rows=[], is_skipped=False)

    def release_gradients(self) -> None:
        """Free the gradients' memory until the next step."""
        self.optimizer.zero_grad(set_to_none=True)

    def _forward(self, rows: Rows, micro: list[int], temperature: float = 1.0) -> list[Tensor]:
        """The model's numbers for a micro-batch, each [B, T], on the CPU as the columns are."""
        prompts = [rows["prompts"][i] for i in micro]
        responses = [rows["responses"][i] for i in micro]
        found = self.model.outputs(self.model.layout(prompts, responses), temperature)
        lengths = [len(response) for response in responses]
        return [pad_sequence(list(part.cpu().split(lengths)), batch_first=True) for part in found]

    def _clip(self) -> Tensor:
        for parameter in self._parameters:
            if parameter.grad is None:
                # No row taught anything: AdamW still decays its moments, as for a gradient of 0.
                parameter.grad = torch.zeros_like(parameter)
        return whole(torch.nn.utils.clip_grad_norm_(self._parameters, self._grad_clip))


def padded(rows: Rows, name: str, micro: list[int]) -> Tensor:
    """Return a column of a micro-batch, [B, T]."""
    return pad_sequence([rows[name][i] for i in micro], batch_first=True)


@torch.no_grad()
def nonfinite_rows(parts: Tensor, mask: Tensor, micro: list[int]) -> list[int]:
    """Return the rows of `micro` with a non-finite number at a valid token; all if none has."""
    is_bad = (~torch.isfinite(parts) & mask.bool()).any(-1)
    found = [row for row, bad in zip(micro, is_bad.tolist(), strict=True) if bad]
    return found or micro


def _totals(rows: Rows, indices: Sequence[int]) -> dict[str, Any]:
    valid = [int(rows["response_mask"][i].bool().sum()) for i in indices]
    return {
        "batch_num_tokens": sum(valid),
        "global_batch_size": sum(count > 0 for count in valid),
    }
