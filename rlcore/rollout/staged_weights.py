"""Two sets of a model's weights: those in use and those a weight update has brought.

A load never touches the weights in use, so an abandoned or failed one leaves nothing to undo. Each
set is one run of bytes in the layout of the publication, of which parameters are views: a transport
writes them where they will be used, and a commit changes pointers.
"""

from collections.abc import Callable

import torch

from rlcore.checkpoint_engine.backends import backend_of, new_receiver
from rlcore.checkpoint_engine.base import WeightReceiver
from rlcore.checkpoint_engine.buffer import Bucket, WeightBuffer
from rlcore.checkpoint_engine.layout import view_tensor
from rlcore.checkpoint_engine.segment import mismatch
from rlcore.errors import WeightSyncError, WeightTransferError
from rlcore.types import WeightMeta


class StagedWeights:
    """Receives published weights for `model` and swaps them in.

    Args:
        model: Whose parameters and persistent buffers are replaced.
        on_bucket: Called after each piece that has come; what it raises ends the load.
    """

    def __init__(
        self, model: torch.nn.Module, on_bucket: Callable[[WeightMeta, Bucket], None] | None = None
    ) -> None:
        # Tied weights: several names, one tensor.
        self._tensors = dict(model.state_dict(keep_vars=True))
        self._on_bucket = on_bucket
        self._receivers: dict[str, WeightReceiver] = {}
        self._in_use, self._coming = WeightBuffer(), WeightBuffer()
        self._staged: dict[int, torch.Tensor] = {}
        self._staged_version: int | None = None

    def stage(self, meta: WeightMeta) -> str:
        """Bring the tensors of `meta` into the second set, cast to the model's type.

        Returns:
            The checksum of the bytes that came, equal to the published one.

        Raises:
            WeightSyncError: names or shapes do not fit the model.
            WeightTransferError: the bytes are damaged, or the sender died or stalled.
        """
        self._staged_version = None
        self._staged = {}
        self._check(meta)
        self._coming.begin(meta)
        for bucket in self._receiver(meta).receive(meta, self._coming):
            if self._on_bucket is not None:
                self._on_bucket(meta, bucket)
        found = self._coming.checksum()
        if found != meta.checksum:
            raise WeightTransferError(mismatch(meta, found))
        for entry in meta.tensors:
            target = self._tensors[entry["name"]]
            if id(target) not in self._staged:
                self._staged[id(target)] = view_tensor(self._coming.data, entry).to(target.dtype)
        self._staged_version = meta.version
        return found

    def commit(self, version: int) -> None:
        """Swap the two sets.

        Raises:
            WeightSyncError: `version` is not what is staged.
        """
        if self._staged_version != version:
            raise WeightSyncError(
                f"weight version {version} is not staged (staged: {self._staged_version})"
            )
        for tensor in self._tensors.values():
            tensor.data = self._staged[id(tensor)]
        self._in_use, self._coming = self._coming, self._in_use
        self._staged_version = None
        self._staged = {}

    def _check(self, meta: WeightMeta) -> None:
        missing = {id(tensor): name for name, tensor in self._tensors.items()}
        for entry in meta.tensors:
            name = entry["name"]
            target = self._tensors.get(name)
            if target is None:
                raise WeightSyncError(
                    f"weight version {meta.version}: the model has no parameter {name!r}"
                )
            if entry["shape"] != list(target.shape):
                raise WeightSyncError(
                    f"weight version {meta.version}: {name} has shape {entry['shape']}, the "
                    f"model's is {list(target.shape)}"
                )
            missing.pop(id(target), None)
        if missing:
            raise WeightSyncError(
                f"weight version {meta.version} lacks {len(missing)} parameters: "
                f"{', '.join(sorted(missing.values())[:5])}"
            )

    def _receiver(self, meta: WeightMeta) -> WeightReceiver:
        backend = backend_of(meta)
        if backend not in self._receivers:
            self._receivers[backend] = new_receiver(meta)
        return self._receivers[backend]
