"""Backend `nccl_on_cpu`: the whole of `nccl` with gloo and a CPU in place of NCCL and GPUs.

What it does not run is NCCL itself and the four lines that name GPUs. Importing it registers it.
"""

import os
from collections.abc import Mapping
from dataclasses import replace

import torch

from rlcore.checkpoint_engine import gloo, nccl
from rlcore.checkpoint_engine.base import (
    CHECKPOINT_ENGINES,
    WEIGHT_RECEIVERS,
    Outcome,
    Replica,
    TransferSettings,
)
from rlcore.checkpoint_engine.pair import Options, PairReceiver, PairSender
from rlcore.checkpoint_engine.sender import push_through_child
from rlcore.types import CallKey, WeightMeta

NAME = "nccl_on_cpu"


def _device(options: Options) -> torch.device:
    return torch.device(options.get("device", "cpu"))


def _place(device: torch.device) -> str:
    return f"{device} of process {os.getpid()}"  # each process is a device


LIBRARY = replace(
    nccl.NCCL, name=NAME, new_group=gloo.new_pair, device=_device, place=_place, release=None
)


@CHECKPOINT_ENGINES.register(NAME)
class Engine:
    """As `NcclCheckpointEngine`, on any torch."""

    def __init__(self, settings: TransferSettings) -> None:
        self._settings = settings

    def push(
        self, key: CallKey, meta: WeightMeta, replicas: Mapping[str, Replica]
    ) -> dict[str, Outcome]:
        """Load `meta` in every replica and return by name how it went."""
        sender = f"{__name__}:{Sender.__name__}"
        return push_through_child(NAME, self._settings, key, meta, replicas, sender)


class Sender(PairSender):
    """The sending rank of every pair."""

    library = LIBRARY


@WEIGHT_RECEIVERS.register(NAME)
class Receiver(PairReceiver):
    """The receiving rank of a pair."""

    library = LIBRARY
