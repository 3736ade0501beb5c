"""Two sets of a model's weights: those in use and those a weight update has brought.

A load never touches the weights in use, so an abandoned or failed one leaves nothing to undo. Each
set is one run of bytes in the layout of the publication, of which parameters are views: a transport
writes them where they will be used, and a commit changes pointers. An adapter that comes
alone is merged into a set of its own (`rlcore.rollout.adapter`).
"""

from collections.abc import Callable, Iterator, Mapping

import torch

from rlcore.checkpoint_engine.backends import backend_of, new_receiver
from rlcore.checkpoint_engine.base import WeightReceiver
from rlcore.checkpoint_engine.buffer import Bucket, WeightBuffer
from rlcore.checkpoint_engine.layout import view_tensor
from rlcore.checkpoint_engine.segment import mismatch
from rlcore.errors import WeightSyncError, WeightTransferError
from rlcore.rollout.adapter import BaseWeights
from rlcore.types import WeightMeta

OnBucket = Callable[[WeightMeta, Bucket], None]


class ReceivedWeights:
    """One run of bytes that published weights are received into, and verified.

    Args:
        on_bucket: Called after each piece that has come; what it raises ends the load.
        receivers: By backend; sets of one replica share them.
    """

    def __init__(
        self,
        on_bucket: OnBucket | None = None,
        receivers: dict[str, WeightReceiver] | None = None,
    ) -> None:
        self._on_bucket = on_bucket
        self._receivers = {} if receivers is None else receivers
        self._buffer = WeightBuffer()

    def receive(self, meta: WeightMeta) -> str:
        """Bring the bytes of `meta`; what was held before is gone.

        Returns:
            Their checksum, equal to the published one.

        Raises:
            WeightSyncError: the source does not hold what `meta` says.
            WeightTransferError: the bytes are damaged, or the sender died or stalled.
        """
        self._buffer.begin(meta)
        for bucket in self._receiver(meta).receive(meta, self._buffer):
            if self._on_bucket is not None:
                self._on_bucket(meta, bucket)
        found = self._buffer.checksum()
        if found != meta.checksum:
            raise WeightTransferError(mismatch(meta, found))
        return found

    def tensors(self, meta: WeightMeta) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of every entry, as views of the bytes, of the published type."""
        for entry in meta.tensors:
            yield entry["name"], view_tensor(self._buffer.data, entry)

    def _receiver(self, meta: WeightMeta) -> WeightReceiver:
        backend = backend_of(meta)
        if backend not in self._receivers:
            self._receivers[backend] = new_receiver(meta)
        return self._receivers[backend]


def check_fit(meta: WeightMeta, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse published weights that are not those of a model.

    Args:
        meta: What was published.
        tensors: The model's parameters and persistent buffers; tied ones are one object under
            several names, of which one is enough.

    Raises:
        WeightSyncError: names or shapes do not fit.
    """
    missing = {id(tensor): name for name, tensor in tensors.items()}
    for entry in meta.tensors:
        name = entry["name"]
        target = tensors.get(name)
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


class StagedWeights:
    """Receives published weights for `model` and swaps them in.

    Args:
        model: Whose parameters and persistent buffers are replaced.
        on_bucket: Called after each piece that has come; what it raises ends the load.
    """

    def __init__(self, model: torch.nn.Module, on_bucket: OnBucket | None = None) -> None:
        # Tied weights: several names, one tensor.
        self._tensors = dict(model.state_dict(keep_vars=True))
        receivers: dict[str, WeightReceiver] = {}
        self._in_use = ReceivedWeights(on_bucket, receivers)
        self._coming = ReceivedWeights(on_bucket, receivers)
        self._base = BaseWeights(self._tensors)
        self._staged: dict[int, torch.Tensor] = {}
        self._staged_meta: WeightMeta | None = None

    def stage(self, meta: WeightMeta) -> str:
        """Bring the tensors of `meta` into the second set, cast to the model's type.

        An adapter that comes alone is added to the weights of the model folder.

        Returns:
            The checksum of the bytes that came, equal to the published one.

        Raises:
            WeightSyncError: names or shapes do not fit the model.
            WeightTransferError: the bytes are damaged, or the sender died or stalled.
        """
        self._staged_meta = None
        self._staged = {}
        if meta.adapter_scale is None:
            check_fit(meta, self._tensors)
        else:
            self._base.check_fit(meta)
        found = self._coming.receive(meta)
        if meta.adapter_scale is None:
            for name, tensor in self._coming.tensors(meta):
                target = self._tensors[name]
                if id(target) not in self._staged:
                    self._staged[id(target)] = tensor.to(target.dtype)
        else:
            adapter = dict(self._coming.tensors(meta))
            self._staged = self._base.with_adapter(adapter, meta.adapter_scale)
        self._staged_meta = meta
        return found

    def commit(self, version: int) -> None:
        """Swap the two sets.

        Raises:
            WeightSyncError: `version` is not what is staged.
        """
        meta = self._staged_meta
        if meta is None or meta.version != version:
            staged = None if meta is None else meta.version
            raise WeightSyncError(f"weight version {version} is not staged (staged: {staged})")
        if meta.adapter_scale is None:
            self._base.replaced_by(version)
        for tensor in self._tensors.values():
            tensor.data = self._staged[id(tensor)]
        self._in_use, self._coming = self._coming, self._in_use
        self._staged_meta = None
        self._staged = {}
