"""Whether this host's shared memory has room for a run's snapshots, before anything starts."""

import shutil
from pathlib import Path

from rlcore.config import RunConfig
from rlcore.config.memory import memory_parts
from rlcore.config.model_shape import read_model_shape
from rlcore.errors import ConfigError
from rlcore.trainer.run_folder import RunFolder
from rlcore.trainer.snapshots import SHARED_MEMORY, SnapshotStore


def check_room(config: RunConfig, folder: RunFolder, shared_memory: Path = SHARED_MEMORY) -> None:
    """Refuse a run whose two snapshots do not fit; one that it has already has its room.

    A model folder that does not tell its sizes is let through: then the first snapshot tells.

    Raises:
        ConfigError: names what is needed, what is free, and what to do.
    """
    shape = read_model_shape(config.actor_rollout_ref.model.path)
    if not config.trainer.snapshots or shape is None:
        return
    needed = memory_parts(config, shape)["snapshots"]
    free = shutil.disk_usage(shared_memory).free + SnapshotStore(folder, shared_memory).num_bytes()
    if needed > free:
        raise ConfigError(
            f"trainer.snapshots=true: two snapshots of this model take {_gigabytes(needed)}, "
            f"{shared_memory} has {_gigabytes(free)} free; give it more (`docker run --shm-size`), "
            "remove what `rollflow doctor` finds there, or set trainer.snapshots=false"
        )


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
