"""Two sets of a model's weights: those in use and those a weight update has brought.

A load never touches the weights in use, so an abandoned or failed one leaves nothing to undo. The
second set's memory is kept from one update to the next: fresh pages cost several times the copy.
"""

import torch

from rlcore.checkpoint_engine.segment import read_tensors
from rlcore.errors import WeightSyncError
from rlcore.types import WeightMeta


class StagedWeights:
    """Receives published weights for `model` and swaps them in."""

    def __init__(self, model: torch.nn.Module) -> None:
        # Tied weights: several names, one parameter.
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._staged: dict[int, torch.Tensor] = {}
        self._staged_version: int | None = None

    def stage(self, meta: WeightMeta) -> None:
        """Copy the tensors of `meta` into the second set, cast to the model's type.

        Raises:
            WeightSyncError: the bytes are damaged, or names or shapes do not fit the model.
        """
        self._staged_version = None
        missing = {id(p): name for name, p in self._parameters.items()}
        for name, tensor in read_tensors(meta):
            parameter = self._parameters.get(name)
            if parameter is None:
                raise WeightSyncError(
                    f"weight version {meta.version}: the model has no parameter {name!r}"
                )
            if tensor.shape != parameter.shape:
                raise WeightSyncError(
                    f"weight version {meta.version}: {name} has shape {list(tensor.shape)}, the "
                    f"model's is {list(parameter.shape)}"
                )
            if id(parameter) not in self._staged:
                self._staged[id(parameter)] = torch.empty_like(parameter, requires_grad=False)
            self._staged[id(parameter)].copy_(tensor)
            missing.pop(id(parameter), None)
        if missing:
            raise WeightSyncError(
                f"weight version {meta.version} lacks {len(missing)} parameters: "
                f"{', '.join(sorted(missing.values())[:5])}"
            )
        self._staged_version = meta.version

    def commit(self, version: int) -> None:
        """Swap the two sets.

        Raises:
            WeightSyncError: `version` is not what is staged.
        """
        if self._staged_version != version:
            raise WeightSyncError(
                f"weight version {version} is not staged (staged: {self._staged_version})"
            )
        for parameter in {id(p): p for p in self._parameters.values()}.values():
            in_use = parameter.data
            parameter.data = self._staged[id(parameter)]
            self._staged[id(parameter)] = in_use
        self._staged_version = None
