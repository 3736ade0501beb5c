"""Engine `nccl`: buckets from one GPU to another by NCCL; see `pair`.

The sending process has a GPU (`engine_kwargs.nccl.device`, cuda:0 unless set), every replica
receives on the GPU that it uses, which must be another. Three buckets lie in the memory of each.
"""

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlcore.checkpoint_engine.base import (
    CHECKPOINT_ENGINES,
    WEIGHT_RECEIVERS,
    Outcome,
    Replica,
    TransferSettings,
)
from rlcore.checkpoint_engine.pair import (
    DEFAULT_HOST,
    Options,
    PairLibrary,
    PairReceiver,
    PairSender,
)
from rlcore.checkpoint_engine.sender import push_through_child
from rlcore.errors import ConfigError, WeightSyncError
from rlcore.types import CallKey, WeightMeta

# torch's stubs do not export the libraries, and a build for CPUs has no NCCL.
_torch: Any = dist
BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
"""Read when a group is made: waiting for a work blocks, and ends in an error at the deadline.
Without it torch's watchdog would end the whole replica when a sender dies."""
INTERFACE = "NCCL_SOCKET_IFNAME"
"""Read by NCCL once in a process: the network interface that it listens on."""

_environment = threading.Lock()


def new_pair(store: Any, rank: int, options: Options, deadline_s: float) -> dist.ProcessGroup:
    """Return a process group of two ranks that belongs to nothing global.

    Raises:
        RuntimeError: there is no GPU.
    """
    nccl = _torch.ProcessGroupNCCL
    chosen = nccl.Options()
    chosen._timeout = timedelta(seconds=deadline_s)
    if options.get("host", DEFAULT_HOST) == DEFAULT_HOST:
        os.environ.setdefault(INTERFACE, "lo")  # what others chose stands
    with _blocking():
        return nccl(store, rank, 2, chosen)


def own_device(options: Options) -> torch.device:
    """Return the device that the options name, else the one in use.

    Raises:
        WeightSyncError: there is none.
    """
    if not torch.cuda.is_available():
        raise WeightSyncError(f"nccl moves memory of GPUs, and process {os.getpid()} has none")
    device = torch.device(options.get("device", f"cuda:{torch.cuda.current_device()}"))
    torch.cuda.set_device(device)
    return device


def place_of(device: torch.device) -> str:
    """Return the GPU's own identity, whatever number a process knows it by."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _abort(group: Any) -> None:
    group.abort()


NCCL = PairLibrary(
    name="nccl", new_group=new_pair, device=own_device, place=place_of, release=_abort
)


@CHECKPOINT_ENGINES.register("nccl")
class NcclCheckpointEngine:
    """Sends buckets from a child process of the caller to every replica at once.

    Options: `host`, the address of the sender's host that replicas can reach; `device`, the
    sender's GPU.
    """

    def __init__(self, settings: TransferSettings) -> None:
        """Take the settings.

        Raises:
            ConfigError: torch is a build without NCCL.
        """
        if not dist.is_nccl_available():
            raise ConfigError(
                f"checkpoint_engine.backend=nccl: torch {torch.__version__} has no NCCL, it is a "
                "build for CPUs; set it to shm (one host) or gloo"
            )
        self._settings = settings

    def push(
        self, key: CallKey, meta: WeightMeta, replicas: Mapping[str, Replica]
    ) -> dict[str, Outcome]:
        """Load `meta` in every replica and return by name how it went.

        Raises:
            WeightTransferError: the sending process failed, died or does not answer.
        """
        return push_through_child("nccl", self._settings, key, meta, replicas)


class NcclSender(PairSender):
    """The sending rank of every pair; runs in the child."""

    library = NCCL


@WEIGHT_RECEIVERS.register("nccl")
class NcclReceiver(PairReceiver):
    """The receiving rank of a pair; runs in the replica."""

    library = NCCL


@contextmanager
def _blocking() -> Iterator[None]:
    """Let a group that is made now block; groups of others in this process stay as they are."""
    with _environment:
        before = os.environ.get(BLOCKING)
        os.environ[BLOCKING] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[BLOCKING]
            else:
                os.environ[BLOCKING] = before
