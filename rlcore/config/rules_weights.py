"""Rules about the back ends of weight updates that need GPUs: one line before anything starts."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Final

from rlcore.config.problems import Problem
from rlcore.config.rules_devices import count_gpus
from rlcore.config.run import RunConfig

_BACKEND: Final = "actor_rollout_ref.rollout.checkpoint_engine.backend"
_KWARGS: Final = "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs"
KIMI: Final = "kimi_ckpt_engine"
PACKAGE: Final = "checkpoint_engine"
_NEEDED: Final = {KIMI: 1, "nccl": 2}
"""GPUs of a host that has everything: NCCL joins no device with itself."""


def weight_backend_can_run(config: RunConfig, num_gpus: int | None = None) -> Iterator[Problem]:
    """`nccl` and `kimi_ckpt_engine` have GPUs, and the latter its package.

    Args:
        config: What is asked for.
        num_gpus: Devices of this host; None: counted. A cluster elsewhere may have others.
    """
    backend = config.actor_rollout_ref.rollout.checkpoint_engine.backend
    if backend not in _NEEDED:
        return
    if config.ray.address is None:
        present, needed = count_gpus() if num_gpus is None else num_gpus, _NEEDED[backend]
        if present < needed:
            has = "no NVIDIA device" if present == 0 else f"{present}"
            yield Problem(
                path=_BACKEND,
                value=backend,
                reason=f"it needs {needed} GPUs or more, and this host has {has}"
                if needed > 1
                else f"it needs a GPU, and this host has {has}",
                fix="set it to shm, or ray.address to a cluster with GPUs",
                involves=("ray.address",),
                is_unsupported=True,
            )
            return
    if backend == KIMI and find_spec(PACKAGE) is None:
        yield Problem(
            path=_BACKEND,
            value=backend,
            reason="the package checkpoint-engine is not installed here",
            fix="pip install 'rollflow[kimi]', or set it to shm",
            is_unsupported=True,
        )


def memory_share_is_one(config: RunConfig) -> Iterator[Problem]:
    """`engine_kwargs.kimi_ckpt_engine.mem_fraction` is a share of a GPU's free memory."""
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    share = engine.engine_kwargs.get(KIMI, {}).get("mem_fraction")
    if share is None or (isinstance(share, int | float) and 0 < share <= 1):
        return
    yield Problem(
        path=f"{_KWARGS}.{KIMI}.mem_fraction",
        value=share,
        reason="it is a share of a GPU's free memory, above 0 and at most 1",
        fix="leave it out: 0.9",
    )


RULES = (weight_backend_can_run, memory_share_is_one)
