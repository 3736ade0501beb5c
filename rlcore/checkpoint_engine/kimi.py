"""Engine `kimi_ckpt_engine`: the package checkpoint-engine carries the bytes to replicas on GPUs.

    caller ── sending process ── a ParameterServer per replica, on the replica's GPU
                  (kimi_sender)      (kimi_server: the package is imported there only)
                                          │ handle of the GPU's memory, by ZMQ
                                     replica (kimi_receiver)

The package has two defects, on any device, against which nothing of it is relied on:

* A load error on the last bucket is reported as success. Here a replica's own acknowledgement
  counts: version, bytes and checksum of what it holds.
* An engine that does not answer hangs `ParameterServer.update` for ever. It runs in a process that
  is killed with the sending one, at the deadline of the push; the replica's end has deadlines too.

One server per replica, so that a replica that dies breaks its own transfer and no other's; all are
on the replicas' host. While weights travel, three buckets lie in each GPU's memory, and the whole
set in pinned memory of the host's, which a server keeps.
"""

from collections.abc import Mapping
from importlib.util import find_spec

import torch

from rlcore.checkpoint_engine.base import CHECKPOINT_ENGINES, Outcome, Replica, TransferSettings
from rlcore.checkpoint_engine.sender import push_through_child
from rlcore.errors import ConfigError
from rlcore.types import CallKey, WeightMeta

NAME = "kimi_ckpt_engine"
PACKAGE = "checkpoint_engine"


@CHECKPOINT_ENGINES.register(NAME)
class KimiCheckpointEngine:
    """Sends buckets from servers of checkpoint-engine, on the GPU of every replica.

    Options: `mem_fraction`, the share of a GPU's free memory that a server may take (default 0.9).
    """

    def __init__(self, settings: TransferSettings) -> None:
        """Take the settings.

        Raises:
            ConfigError: the package is not there, or torch is a build for CPUs.
        """
        require_package()
        if torch.version.cuda is None:
            raise ConfigError(
                f"checkpoint_engine.backend={NAME}: it needs a GPU, and torch {torch.__version__} "
                "is a build for CPUs; set it to shm (one host) or gloo"
            )
        self._settings = settings

    def push(
        self, key: CallKey, meta: WeightMeta, replicas: Mapping[str, Replica]
    ) -> dict[str, Outcome]:
        """Load `meta` in every replica and return by name how it went.

        Raises:
            WeightTransferError: the sending process failed, died or does not answer.
        """
        return push_through_child(NAME, self._settings, key, meta, replicas)


def require_package() -> None:
    """Refuse to go on without the package.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec(PACKAGE) is None:
        raise ConfigError(
            f"checkpoint_engine.backend={NAME}: the package checkpoint-engine is not installed; "
            "pip install 'rollflow[kimi]'"
        )
