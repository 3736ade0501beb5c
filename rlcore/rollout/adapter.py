"""The weights that a model began with, below LoRA adapters that are published alone.

What is served is W + scale * B A, worked out once per update and in float32, so that a token costs
what it costs without an adapter. https://arxiv.org/abs/2106.09685
"""

from collections import Counter
from collections.abc import Mapping

from torch import Tensor

from rlcore.errors import WeightSyncError
from rlcore.types import WeightMeta

DOWN, UP, WEIGHT = ".lora_A.weight", ".lora_B.weight", ".weight"


class BaseWeights:
    """Keeps the weights of the model folder until whole weights replace them.

    Args:
        tensors: The model's parameters and persistent buffers by name, tied ones one object.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        # The same memory: it costs nothing until others take its place in the model.
        self._base = {id(tensor): tensor.data for tensor in tensors.values()}
        self._names = Counter(id(tensor) for tensor in tensors.values())
        self._replaced_by: int | None = None

    def replaced_by(self, version: int) -> None:
        """Let the weights go: whole ones of `version` are served from now on."""
        self._base.clear()
        self._replaced_by = version

    def check_fit(self, meta: WeightMeta) -> None:
        """Refuse an adapter that is not one of this model.

        Raises:
            WeightSyncError: a tensor belongs to no linear layer of its own, lacks its other half or
                has another shape; or whole weights were committed before.
        """
        what = f"weight version {meta.version}, an adapter alone,"
        if self._replaced_by is not None:
            raise WeightSyncError(
                f"{what} belongs above the weights of the model folder, and version "
                f"{self._replaced_by} replaced these"
            )
        shapes = {entry["name"]: entry["shape"] for entry in meta.tensors}
        for name, shape in shapes.items():
            layer = name.removesuffix(DOWN).removesuffix(UP)
            target = self._tensors.get(layer + WEIGHT)
            if layer == name or target is None or target.ndim != 2:
                raise WeightSyncError(f"{what} has {name}, and the model no such linear layer")
            if self._names[id(target)] > 1:
                raise WeightSyncError(f"{what} has {name}, and {layer}{WEIGHT} is tied to another")
            down, up = shapes.get(layer + DOWN), shapes.get(layer + UP)
            if down is None or up is None:
                raise WeightSyncError(f"{what} has {name} without its other half")
            if [up[0], down[1]] != list(target.shape) or up[1] != down[0]:
                raise WeightSyncError(
                    f"{what} has {name} of shape {shape}, and the model's weight is "
                    f"{list(target.shape)}"
                )

    def with_adapter(self, adapter: Mapping[str, Tensor], scale: float) -> dict[int, Tensor]:
        """Return all weights with the adapter in them, by the identity of the model's tensors."""
        found = dict(self._base)
        for name, down in adapter.items():
            if not name.endswith(DOWN):
                continue
            layer = name.removesuffix(DOWN)
            target = self._tensors[layer + WEIGHT]
            base, up = self._base[id(target)], adapter[layer + UP]
            merged = base.float() + scale * (up.float() @ down.float())
            found[id(target)] = merged.to(target.dtype)
        return found
