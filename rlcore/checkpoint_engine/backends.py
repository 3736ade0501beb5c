"""The backends that ship, registered by importing them."""

from rlcore.checkpoint_engine import gloo, kimi, kimi_receiver, mooncake, naive, nccl, shm
from rlcore.checkpoint_engine.base import WEIGHT_RECEIVERS, WeightReceiver
from rlcore.types import WeightMeta

BUILT_IN = (gloo, kimi, kimi_receiver, mooncake, naive, nccl, shm)


def new_receiver(meta: WeightMeta) -> WeightReceiver:
    """Return a receiver for the backend that `meta` names.

    Raises:
        ConfigError: nothing of that name is registered.
    """
    return WEIGHT_RECEIVERS.get(backend_of(meta))()


def backend_of(meta: WeightMeta) -> str:
    """Return the name of the backend that brings `meta`."""
    return meta.transport.get("backend", "naive")
