"""A server of checkpoint-engine's with stand-ins for a GPU; see `kimi_on_cpu`."""

import importlib
from multiprocessing.connection import Connection
from typing import Any

from rlcore.checkpoint_engine import kimi_server
from rlcore.testing import kimi_on_cpu


def serve(requests: Connection, place: str, owner: int, mem_fraction: float) -> None:
    """Be a server for the device `place`; see `kimi_server.serve`."""
    devices: Any = importlib.import_module("checkpoint_engine.device_utils").DeviceManager
    devices._detect_device_type = lambda _self: "cpu"
    devices._setup_device_module = lambda self: setattr(
        self, "device_module", kimi_on_cpu.device_module(place)
    )
    devices.backend = "gloo"
    pinning: Any = importlib.import_module("checkpoint_engine.pin_memory")
    pinning.torch = kimi_on_cpu.TorchWithoutPinning()
    kimi_server.package.reduce_tensor = kimi_on_cpu.share
    kimi_server.serve(requests, place, owner, mem_fraction)
