"""A trainer's side of weight updates without a model, for processes that tests start.

Here and not in a test module: what another process unpickles has to be importable there.
"""

import functools
from pathlib import Path

import torch

from rlcore.checkpoint_engine.manager import CheckpointEngineManager
from rlcore.checkpoint_engine.segment import write_tensors
from rlcore.testing.replica_process import TensorSpec
from rlcore.types import CallKey, WeightMeta

SPECS: list[TensorSpec] = [
    ("embed", "float32", (1031, 1021), None),  # 4.2 MB and odd: no bucket ends where a tensor does
    ("norm", "bfloat16", (7,), None),
    ("wide", "bfloat16", (3_000_001,), None),  # larger than a bucket
    ("nothing", "float32", (0, 4), None),
    ("scalar", "float32", (), None),
    ("steps", "int64", (3,), None),
    ("flags", "bool", (5,), None),
    ("small", "float16", (3, 3), None),
    ("head", "float32", (1031, 1021), "embed"),
    ("tail", "bfloat16", (2_500_003,), None),
]
"""Odd sizes, several types, one tensor that is tied and one that is larger than a bucket."""


@functools.cache
def tensors(version: int) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of SPECS with values that follow from the version."""
    generator = torch.Generator().manual_seed(version)
    made: dict[str, torch.Tensor] = {}
    for name, dtype, shape, tied_to in SPECS:
        raw = torch.randint(0, 2, shape, generator=generator)
        if dtype not in ("bool", "int64"):
            raw = torch.randn(shape, generator=generator)
        made[name] = made[tied_to] if tied_to else raw.to(getattr(torch, dtype))
    made["steps"] += 2**24 + 1
    return list(made.items())


class WeightSource:
    """A trainer whose weights follow from its version."""

    def __init__(self, folder: Path) -> None:
        self.published: WeightMeta | None = None
        self.path = folder / "weights"
        self.version = 1

    def publish_weights(self, key: CallKey) -> WeightMeta:
        """Write the segment."""
        del key
        self.published = write_tensors(self.path, tensors(self.version), "auto", self.version)
        return self.published

    def published_weights(self) -> WeightMeta | None:
        """Return what the segment holds."""
        return self.published


def update_to_2(manager: CheckpointEngineManager) -> None:
    """Bring weights 2 to the manager's replicas."""
    manager.update_weights(2)
