"""The trainer modes that ship, one small file each, and how a mode is found by its name."""

from rlcore.trainer import colocate_async, separate_async, sync
from rlcore.trainer.base import TRAINERS, PPOTrainer

BUILT_IN = (
    sync.PPOTrainerSync,
    colocate_async.PPOTrainerColocateAsync,
    separate_async.PPOTrainerSeparateAsync,
)
"""Importing this module registers them."""


def get_trainer_cls(mode: str) -> type[PPOTrainer]:
    """Return the class of `trainer.v1.trainer_mode` (verl's name).

    Raises:
        ConfigError: there is none; the message lists the known modes.
    """
    return TRAINERS.get(mode)
