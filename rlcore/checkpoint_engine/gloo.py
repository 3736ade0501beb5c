"""Engine `gloo`: buckets over TCP by torch's gloo, also between hosts; see `pair`.

The transfers listen on the address `engine_kwargs.gloo.host` only, as the store does.
"""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rlcore.checkpoint_engine.base import (
    CHECKPOINT_ENGINES,
    WEIGHT_RECEIVERS,
    Outcome,
    Replica,
    TransferSettings,
)
from rlcore.checkpoint_engine.pair import DEFAULT_HOST, PairLibrary, PairReceiver, PairSender
from rlcore.checkpoint_engine.sender import push_through_child
from rlcore.types import CallKey, WeightMeta

# torch's stubs do not export the libraries.
_torch: Any = dist


def new_pair(
    store: Any, rank: int, options: Mapping[str, Any], deadline_s: float
) -> dist.ProcessGroup:
    """Return a process group of two ranks that belongs to nothing global.

    Raises:
        RuntimeError: the other rank did not come within `deadline_s`.
    """
    gloo = _torch.ProcessGroupGloo
    chosen = gloo._Options()
    chosen._timeout = timedelta(seconds=deadline_s)
    chosen._devices = [gloo.create_device(hostname=options.get("host", DEFAULT_HOST))]
    return gloo(store, rank, 2, chosen)


GLOO = PairLibrary(name="gloo", new_group=new_pair)


@CHECKPOINT_ENGINES.register("gloo")
class GlooCheckpointEngine:
    """Sends buckets from a child process of the caller to every replica at once.

    Options: `host`, the address of the sender's host that replicas can reach.
    """

    def __init__(self, settings: TransferSettings) -> None:
        self._settings = settings

    def push(
        self, key: CallKey, meta: WeightMeta, replicas: Mapping[str, Replica]
    ) -> dict[str, Outcome]:
        """Load `meta` in every replica and return by name how it went.

        Raises:
            WeightTransferError: the sending process failed, died or does not answer.
        """
        return push_through_child("gloo", self._settings, key, meta, replicas)


class GlooSender(PairSender):
    """The sending rank of every pair; runs in the child."""

    library = GLOO


@WEIGHT_RECEIVERS.register("gloo")
class GlooReceiver(PairReceiver):
    """The receiving rank of a pair; runs in the replica."""

    library = GLOO
