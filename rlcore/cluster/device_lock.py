"""The device lock: one training run per set of devices, and a name for who holds them.

A local cluster of ours is guarded by a file lock of this machine's user; a shared cluster by a named
Ray actor, which dies with its driver. Taken before anything else is started.
"""

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from rlcore.errors import DeviceLockError
from rlcore.trainer.run_folder import HeldLock

logger = logging.getLogger(__name__)

ACTOR_NAME = "rollflow-device-lock"
NAMESPACE = "rollflow"
POLL_S = 1.0


def local_device_lock(holder: str, *, wait_s: float) -> HeldLock:
    """Return the lock of this machine's devices, for a cluster that this process starts.

    Raises (on entering):
        DeviceLockError: another run holds the devices after `wait_s` seconds; names it.
    """
    folder = Path(tempfile.gettempdir()) / f"rollflow-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    lock = HeldLock(
        folder / "devices.lock", holder=holder, what="this machine's devices", wait_s=wait_s
    )
    if wait_s > 0:
        logger.info("waiting up to %.0f s for the devices, held by %s", wait_s, lock.current_holder())
    return lock


@ray.remote(num_cpus=0, max_restarts=0)
class _Holder:
    """Exists while its run holds the cluster's devices."""

    def __init__(self, holder: str) -> None:
        self._holder = holder

    def name(self) -> str:
        return self._holder


@contextlib.contextmanager
def cluster_device_lock(holder: str, *, wait_s: float) -> Iterator[None]:
    """Hold the devices of the Ray cluster that this process is connected to.

    Raises:
        DeviceLockError: another run holds them after `wait_s` seconds; names it.
    """
    actor = _acquire(holder, wait_s=wait_s)
    try:
        yield
    finally:
        ray.kill(actor)


def _acquire(holder: str, *, wait_s: float) -> Any:
    overdue = time.monotonic() + wait_s
    while True:
        try:
            actor = _Holder.options(name=ACTOR_NAME, namespace=NAMESPACE).remote(holder)
            ray.get(actor.name.remote(), timeout=60)
        except ValueError:
            current = _current_holder()
        else:
            return actor
        if time.monotonic() >= overdue:
            raise DeviceLockError(
                f"the cluster's devices are held by {current}; wait for it to end, or set "
                "deadlines.device_lock to the seconds that this run shall wait"
            )
        logger.info("waiting for the cluster's devices, held by %s", current)
        time.sleep(POLL_S)


def _current_holder() -> str:
    try:
        actor = ray.get_actor(ACTOR_NAME, namespace=NAMESPACE)
        return ray.get(actor.name.remote(), timeout=10)
    except (ValueError, ray.exceptions.RayActorError):
        return "a run that is just ending"
