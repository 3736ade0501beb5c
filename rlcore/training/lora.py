"""Low-rank adapters by peft: added to the model in place, published merged or alone.

A linear layer W gets W + scale * B A with small A and B, which alone are trained; B starts at 0, so
that the model starts as what it was. https://arxiv.org/abs/2106.09685
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlcore.errors import ConfigError
from rlcore.training.plan import ALL_LINEAR, LoraSpec
from rlcore.training.sharding import whole

ADAPTER = "default"
SIDES = ("lora_A", "lora_B")


def add_lora(model: PreTrainedModel, spec: LoraSpec) -> None:
    """Put adapters into the model and freeze everything else.

    Raises:
        ConfigError: no module has one of the names.
    """
    is_all = spec.target_modules == (ALL_LINEAR,)
    config = LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,  # pyright: ignore[reportArgumentType]  fractions work as well
        target_modules=ALL_LINEAR if is_all else list(spec.target_modules),
        exclude_modules=list(spec.exclude_modules) if spec.exclude_modules else None,
        task_type="CAUSAL_LM",
    )
    try:
        inject_adapter_in_model(config, model, ADAPTER)
    except ValueError as error:
        raise ConfigError(
            f"actor_rollout_ref.model.target_modules={list(spec.target_modules)}, exclude_modules="
            f"{list(spec.exclude_modules or ())}: no adapter can be added: {error}"
        ) from error


@contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """Compute with the base model alone."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        # peft's own switch would also change which weights have gradients.
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged_tensors(
    model: nn.Module, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's weights under the names they have without adapters, each whole.

    Every rank must go through all of them.

    Args:
        model: With or without adapters, sharded or not; it stays as it is.
        dtype: Type that floating point shards are cast to before they travel; None: as they are.
            Merging happens in the weights' own type.
    """
    adapted = {
        f"{name}.base_layer.weight": module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
    state = model.state_dict(keep_vars=True)
    uses = Counter(id(tensor) for tensor in state.values())
    tied: dict[int, Tensor] = {}  # the others are let go, one after the other
    for name, tensor in state.items():
        if ".lora_" in name:
            continue
        found = tied.get(id(tensor))
        if found is None:
            found = _merged(tensor, adapted.get(name), dtype)
            if uses[id(tensor)] > 1:
                tied[id(tensor)] = found
        yield name.replace(".base_layer.", "."), found


def adapter_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapters' tensors alone, in their own type, each whole.

    Every rank must go through all of them. Names are peft's, without that of the adapter:
    `….q_proj.lora_A.weight` belongs to `….q_proj.weight`.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            for side, tensor in zip(SIDES, _sides(layer), strict=True):
                yield f"{name}.{side}.weight", tensor


def _sides(layer: LoraLayer) -> tuple[Tensor, Tensor]:
    """Return A and B of a layer, whole."""
    down, up = (
        whole(side.get_submodule(ADAPTER).get_parameter("weight").detach())
        for side in (layer.lora_A, layer.lora_B)
    )
    return down, up


@torch.no_grad()
def _merged(tensor: Tensor, layer: LoraLayer | None, dtype: torch.dtype | None) -> Tensor:
    if layer is None:
        is_cast = isinstance(tensor, DTensor) and dtype is not None and tensor.is_floating_point()
        return whole(tensor.detach().to(dtype) if is_cast else tensor.detach())
    down, up = _sides(layer)
    return whole(tensor.detach()) + layer.scaling[ADAPTER] * (up @ down)
