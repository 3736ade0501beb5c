"""The value model: what a response will be worth, told at each of its tokens.

The value of a token is read where the token is predicted: from the last state before it. The head
starts at 0, so that the first advantages are the returns themselves.

Legend: B rows (trajectories) of a micro-batch, T response positions, M response tokens of all rows.
"""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlcore.algorithms import masked_mean, value_loss
from rlcore.pretrained import load_causal_lm
from rlcore.training.batches import Rows
from rlcore.training.checkpoint import read_checkpoint, trained_state, write_checkpoint
from rlcore.training.layout import Layout, Packing
from rlcore.training.plan import CriticSpec
from rlcore.training.ranks import Ranks
from rlcore.training.row_model import AutocastType, RowModel
from rlcore.training.spec import TrainingSpec
from rlcore.training.steps import Updater, nonfinite_rows, padded
from rlcore.training.trainee import Trainee

VALUE_COLUMNS = ("prompts", "responses", "response_mask", "values", "returns")


class ValueModel(RowModel):
    """A language model's body with one number per token."""

    def __init__(
        self,
        model_path: str,
        *,
        dtype: AutocastType,
        packing: Packing,
        trust_remote_code: bool = False,
        gradient_checkpointing: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        model = load_causal_lm(model_path, torch.float32, trust_remote_code=trust_remote_code)
        super().__init__(
            model, dtype=dtype, packing=packing, gradient_checkpointing=gradient_checkpointing
        )
        self.place(ResponseValues(self.model.base_model), ranks or Ranks())

    def values(self, layout: Layout) -> Float[Tensor, " M"]:
        """Return the value of every response token, row after row."""
        with self.autocast():
            return self.net(layout.to(self.model.device))[0]

    def outputs(self, layout: Layout, temperature: float) -> tuple[Tensor, ...]:
        """Return the values; they have no temperature."""
        return (self.values(layout),)


class ResponseValues(nn.Module):
    """Body and head: the root that FSDP shards."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        assert isinstance(model, PreTrainedModel)
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, layout: Layout) -> tuple[Tensor]:
        """Return the value of every response token, float32."""
        hidden = self.model(**layout.model_inputs, use_cache=False)[0]
        chosen = hidden.flatten(0, 1).index_select(0, layout.predictors)
        with torch.autocast(chosen.device.type, enabled=False):
            return (self.head(chosen.to(self.head.weight.dtype))[:, 0],)


class ValueUpdater(Updater):
    """Makes optimizer steps on a value model."""

    columns: tuple[str, ...] = VALUE_COLUMNS

    def __init__(self, model: ValueModel, spec: CriticSpec, ranks: Ranks | None = None) -> None:
        super().__init__(model, spec.optimizer, ranks or Ranks())
        self._spec = spec

    def _teaches(self, rows: Rows, index: int) -> bool:
        return bool(rows["response_mask"][index].bool().any())

    def _accumulate(
        self,
        rows: Rows,
        micro: list[int],
        totals: dict[str, Any],
        sums: dict[str, float],
        num_tokens: int,
    ) -> list[int]:
        (values,) = self._forward(rows, micro)
        mask = padded(rows, "response_mask", micro)
        old, returns = padded(rows, "values", micro), padded(rows, "returns", micro)
        loss = value_loss(
            values,
            returns,
            old,
            mask,
            agg=self._spec.loss_agg_mode,
            agg_kw={**totals, "loss_scale_factor": self._spec.loss_scale_factor},
            **self._spec.loss_settings,
        )
        loss.backward()
        if not torch.isfinite(loss):
            return nonfinite_rows(values + old + returns, mask, micro)
        share = mask.bool().sum().item() / num_tokens
        clip = self._spec.loss_settings.get("clip")
        found = {
            "vf_loss": loss.item(),
            "vf_clipfrac": share * _clipped(values.detach(), old, returns, mask, clip),
            "vpred_mean": share * masked_mean(values.detach(), mask).item(),
        }
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + value
        return []


class Critic:
    """The value model with its optimizer and progress."""

    def __init__(self, run: TrainingSpec, spec: CriticSpec, ranks: Ranks) -> None:
        self.spec = spec
        self.model = ValueModel(
            spec.model_path,
            dtype=run.dtype,
            packing=run.packing,
            trust_remote_code=spec.trust_remote_code,
            gradient_checkpointing=run.gradient_checkpointing,
            ranks=ranks,
        )
        self.updater = ValueUpdater(self.model, spec, ranks)
        self.trainee = Trainee(
            "critic", self.updater, spec.plan, folder=Path(run.folder), ranks=ranks
        )

    def save(self, folder: Path, ranks: Ranks) -> None:
        """Write everything needed to go on from here to `folder`."""
        state = trained_state(self.model.net, self.updater.optimizer)
        write_checkpoint(folder, state, self.trainee.progress.state_dict(), ranks)

    def load(self, folder: Path, ranks: Ranks) -> None:
        """Take over what `save` wrote."""
        counters = read_checkpoint(folder, self.model.net, self.updater.optimizer, ranks)
        self.trainee.progress.load_state_dict(counters)


@torch.no_grad()
def _clipped(
    values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float | None
) -> float:
    """Share of valid tokens whose clipped error is the larger one."""
    if clip is None:
        return 0.0
    bounded = torch.clamp(values, old - clip, old + clip)
    is_clipped = (bounded - returns).square() > (values - returns).square()
    return masked_mean(is_clipped.float(), mask).item()
