"""Backend `kimi_on_cpu`: all of `kimi_ckpt_engine`, the package included, without a GPU.

What stands in for the GPU is the least that the package asks of one: its name and numbers, gloo for
NCCL, ordinary memory for pinned, and a file in memory for the handle of a GPU's memory. Buckets,
messages, acknowledgements and errors are the package's own. Importing it registers it.
"""

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from rlcore.checkpoint_engine.base import (
    CHECKPOINT_ENGINES,
    WEIGHT_RECEIVERS,
    Outcome,
    Replica,
    TransferSettings,
)
from rlcore.checkpoint_engine.kimi import require_package
from rlcore.checkpoint_engine.kimi_receiver import KimiReceiver
from rlcore.checkpoint_engine.kimi_sender import KimiSender
from rlcore.checkpoint_engine.sender import push_through_child
from rlcore.types import CallKey, WeightMeta

NAME = "kimi_on_cpu"
FREE_BYTES = 1 << 30
"""What the device says it has."""


@CHECKPOINT_ENGINES.register(NAME)
class Engine:
    """As `KimiCheckpointEngine`, on any torch."""

    def __init__(self, settings: TransferSettings) -> None:
        require_package()
        self._settings = settings

    def push(
        self, key: CallKey, meta: WeightMeta, replicas: Mapping[str, Replica]
    ) -> dict[str, Outcome]:
        """Load `meta` in every replica and return by name how it went."""
        sender = f"{__name__}:{Sender.__name__}"
        return push_through_child(NAME, self._settings, key, meta, replicas, sender)


class Sender(KimiSender):
    """Its servers' processes have the stand-ins."""

    server_module = "rlcore.testing.kimi_server_on_cpu"


@WEIGHT_RECEIVERS.register(NAME)
class Receiver(KimiReceiver):
    """Each process is a device."""

    def place(self) -> str:
        """Return the device's name."""
        return f"CPU-{os.getpid()}"

    def map_memory(self, handle: tuple[Any, Any]) -> torch.Tensor:
        """Map the server's memory."""
        function, arguments = handle
        return function(*arguments)

    def let_go(self) -> None:
        """Do nothing: the memory is unmapped with its tensor."""


def map_file(path: str, num_bytes: int) -> torch.Tensor:
    """Return the memory of another process as a tensor."""
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def share(tensor: torch.Tensor) -> tuple[Any, tuple[str, int]]:
    """Move a tensor into memory that another process can map; return how it does."""
    descriptor = os.memfd_create("rollflow")
    os.ftruncate(descriptor, tensor.nbytes)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    tensor.set_(map_file(path, tensor.nbytes))  # pyright: ignore[reportArgumentType]
    return map_file, (path, tensor.nbytes)


def device_module(place: str) -> Any:
    """Return what the package asks of `torch.cuda`."""
    return SimpleNamespace(
        device_count=lambda: 1,
        set_device=lambda _index: None,
        get_device_properties=lambda _index: SimpleNamespace(uuid=place),
        mem_get_info=lambda: (FREE_BYTES, FREE_BYTES),
        memory_allocated=lambda: 0,
        memory_reserved=lambda: 0,
        synchronize=lambda: None,
        empty_cache=lambda: None,
        ipc_collect=lambda: None,
    )


class TorchWithoutPinning:
    """torch for a module that pins memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        """Return ordinary memory."""
        del pin_memory
        return torch.empty(*size, **options)
