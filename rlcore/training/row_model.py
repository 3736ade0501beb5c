"""A transformers model seen as: rows in, numbers per response token out.

What policy, reference and value model share: the layout of rows, autocast, sharding, and passes
that only keep other ranks company.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlcore.training.attention import ATTENTION_NAME
from rlcore.training.layout import Layout, Packing, packed_layout, padded_layout
from rlcore.training.ranks import Ranks
from rlcore.training.sharding import shard

logger = logging.getLogger(__name__)

AutocastType = Literal["bfloat16", "float32"]


class RowModel(ABC):
    """A model with float32 weights whose forward pass may run under autocast.

    Attributes:
        model: The transformers model.
        net: What is called, and what FSDP shards: `model` with our own output.
        packing: Layout in use.
    """

    net: nn.Module

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        dtype: AutocastType,
        packing: Packing,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.dtype = dtype
        # dropout stays off (eval): log-probs before and during the update must be one function
        self.model = model.eval()
        self.packing: Packing = packing
        if packing == "shared_prefix" and not _can_pack(model):
            logger.info("%s: attention is not plain causal; rows are padded", model.name_or_path)
            self.packing = "padded"
        model.set_attn_implementation(ATTENTION_NAME if self.packing == "shared_prefix" else "sdpa")
        if gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            for layer in decoder_layers(model):
                # transformers recomputes layers in training mode only; their parts stay in eval
                layer.training = True

    def place(self, net: nn.Module, ranks: Ranks) -> None:
        """Take `net` as what is called, move it to the device and divide it among the ranks."""
        layers = decoder_layers(self.model)
        net.to(ranks.device)
        shard(net, layers, ranks)
        self.net = net

    def layout(self, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Layout:
        """Lay the rows out for a forward pass."""
        if self.packing == "shared_prefix":
            return packed_layout(prompts, responses)
        return padded_layout(prompts, responses)

    @abstractmethod
    def outputs(self, layout: Layout, temperature: float) -> tuple[Tensor, ...]:
        """Return the net's numbers for every response token, row after row."""

    def idle_pass(self, *, backward: bool) -> None:
        """Go through the model with a padding row, while other ranks have a micro-batch more.

        Shards are gathered layer by layer, so every rank must make as many passes. Nothing of this
        one is kept, and its gradient is 0.
        """
        token = torch.zeros(1, dtype=torch.long)
        with torch.set_grad_enabled(backward):
            found = self.outputs(self.layout([token], [token]), 1.0)
        if backward:
            (0.0 * sum(part.sum() for part in found)).backward()  # type: ignore[union-attr]

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context that the net runs in."""
        if self.dtype == "bfloat16":
            return torch.autocast(self.model.device.type, dtype=torch.bfloat16)
        return nullcontext()


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks that the model's authors name as units, outermost first."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _can_pack(model: PreTrainedModel) -> bool:
    """Whether every layer is plain causal attention through transformers' attention interface."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        is_full = getattr(config, "sliding_window", None) is None
    else:
        is_full = set(layer_types) == {"full_attention"}
    has_cap = getattr(config, "attn_logit_softcapping", None) is not None
    return is_full and not has_cap and bool(getattr(model, "_supports_attention_backend", False))
