"""The device lock: one training run per set of devices, and a name for who holds them.

A local cluster of ours is guarded by a file lock of one user in one folder for temporary files: two
users, or two values of TMPDIR, do not exclude each other, and the message names the file. A shared
cluster is guarded by a named Ray actor, which dies with its driver. Taken before anything else is
started.
"""

import asyncio
import contextlib
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from rlcore.errors import DeviceLockError
from rlcore.trainer.run_folder import HeldLock

logger = logging.getLogger(__name__)

ACTOR_NAME = "rollflow-device-lock"
NAMESPACE = "rollflow"
POLL_S = 1.0
REPORT_EVERY_S = 60.0
CALL_DEADLINE_S = 60.0


@contextlib.asynccontextmanager
async def waited_lock(
    make_lock: Callable[[], AbstractContextManager[Any]], *, wait_s: float
) -> AsyncIterator[None]:
    """Hold a lock, trying again for `wait_s` seconds while another run holds it.

    Raises:
        DeviceLockError: still held then; names the holder.
    """
    began = reported = time.monotonic()
    while True:
        lock = make_lock()
        try:
            await asyncio.to_thread(lock.__enter__)
            break
        except DeviceLockError as error:
            waited_s = time.monotonic() - began
            if waited_s >= wait_s:
                raise DeviceLockError(
                    f"{error} (waited {waited_s:.0f} s; deadlines.device_lock={wait_s:g})"
                ) from error
            if reported == began or time.monotonic() - reported >= REPORT_EVERY_S:
                logger.warning("waiting up to %.0f s: %s", wait_s - waited_s, error)
                reported = time.monotonic()
        await asyncio.sleep(POLL_S)
    try:
        yield
    finally:
        await asyncio.to_thread(lock.__exit__, None, None, None)


def local_device_lock(holder: str, folder: Path | None = None) -> HeldLock:
    """Return the lock of this user's devices, for a cluster that this process starts.

    Args:
        holder: Who asks, as others will read it.
        folder: Where the lock's file lies; None: a folder of this user's for temporary files.

    Raises:
        DeviceLockError: the folder cannot be used, or is another user's.
    """
    folder = folder or Path(tempfile.gettempdir()) / f"rollflow-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        raise DeviceLockError(
            f"the devices cannot be locked in {folder}: {error.strerror}; set TMPDIR to a folder "
            "that you may write to"
        ) from error
    if owner != os.getuid():
        raise DeviceLockError(
            f"the devices cannot be locked in {folder}: it belongs to user {owner} and you are "
            f"user {os.getuid()}; remove it, or set TMPDIR to another folder"
        )
    path = folder / "devices.lock"
    return HeldLock(path, holder=holder, what=f"the devices (lock {path})")


@ray.remote(num_cpus=0, max_restarts=0)
class _Holder:
    """Exists while its run holds the cluster's devices."""

    def __init__(self, holder: str) -> None:
        self._holder = holder

    def name(self) -> str:
        return self._holder


@contextlib.contextmanager
def cluster_device_lock(holder: str) -> Iterator[None]:
    """Hold the devices of the Ray cluster that this process is connected to.

    Raises:
        DeviceLockError: another run holds them; names it.
    """
    actor_class: Any = _Holder
    try:
        # An actor's name is unique in its namespace, so making one is an atomic take.
        actor: Any = actor_class.options(name=ACTOR_NAME, namespace=NAMESPACE).remote(holder)
        ray.get(actor.name.remote(), timeout=CALL_DEADLINE_S)
    except ValueError as error:
        raise DeviceLockError(
            f"the cluster's devices are held by {_current_holder()}; wait for it to end"
        ) from error
    try:
        yield
    finally:
        ray.kill(actor)


def _current_holder() -> str:
    try:
        actor: Any = ray.get_actor(ACTOR_NAME, namespace=NAMESPACE)
        return ray.get(actor.name.remote(), timeout=CALL_DEADLINE_S)
    except (ValueError, RayActorError, GetTimeoutError):
        return "a run that is just ending"
