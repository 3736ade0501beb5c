"""Join a Ray cluster or start one, and hold the devices of a run on it."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import ray

from rlcore.cluster.device_lock import cluster_device_lock, local_device_lock, waited_lock
from rlcore.cluster.ends import Ends
from rlcore.cluster.worker_environment import worker_environment
from rlcore.config import RunConfig
from rlcore.errors import ConfigError

NUM_STORAGE_UNITS = 1
RESOURCES_S = 5.0
"""How long Ray may take to report its CPUs after it was joined."""

RAY_END_S = 4.0
"""For Ray itself to end."""

QUEUE_CPUS = 1 + NUM_STORAGE_UNITS
"""Logical CPUs that TransferQueue's controller and storage ask for; our own actors ask for none."""


def connect_ray(config: RunConfig) -> bool:
    """Join the cluster that the configuration names, or start a local one.

    Returns:
        Whether this process started the cluster or joined it now, and so leaves it at the end.

    Raises:
        ConfigError: the cluster cannot be reached, or has too few CPUs.
    """
    if ray.is_initialized():
        _check_cpus(config)
        return False
    address = config.ray.address
    options: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.WARNING,
        "runtime_env": worker_environment(),
    }
    if address is None:
        options |= {
            "address": "local",
            "num_cpus": config.ray.num_cpus,
            "include_dashboard": False,
            # Ray's own choice is 15: whatever else runs would stop a thread of the trainer or the
            # engine, and with it all that compute beside it and wait for it.
            "_system_config": {"worker_niceness": 0},
        }
    else:
        options["address"] = address
    try:
        with _without_chatter():
            ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"ray.address={address}: the cluster cannot be joined: {error}; start one with "
            "`ray start --head`, or leave ray.address null for a local one"
        ) from error
    try:
        _check_cpus(config)
    except ConfigError:
        ray.shutdown()
        raise
    return True


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
    """Keep Ray's warnings that it starts in a thread and with a token off the console."""
    names = ("worker", "authentication.authentication_token_setup")
    chatty = [logging.getLogger(f"ray._private.{name}") for name in names]
    levels = [logger_.level for logger_ in chatty]
    for logger_ in chatty:
        logger_.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger_, level in zip(chatty, levels, strict=True):
            logger_.setLevel(level)


def _check_cpus(config: RunConfig) -> None:
    # The total: what is free is asked under the device lock, when the queue's host starts.
    ends = time.monotonic() + RESOURCES_S
    while (total := ray.cluster_resources().get("CPU", 0.0)) < QUEUE_CPUS:
        if time.monotonic() >= ends:
            break
        time.sleep(0.1)
    refuse_small_cluster(config, total)


def refuse_small_cluster(config: RunConfig, total_cpus: float) -> None:
    """Refuse a cluster that cannot hold the queue's actors, which would wait for ever.

    Raises:
        ConfigError: it has fewer than QUEUE_CPUS logical CPUs.
    """
    if total_cpus >= QUEUE_CPUS:
        return
    raise ConfigError(
        f"the Ray cluster at {config.ray.address or 'this machine'} has {total_cpus:g} CPUs, "
        f"the run needs {QUEUE_CPUS}; start it with more (`ray start --head --num-cpus "
        f"{config.ray.num_cpus}`; logical ones, they reserve no core) or set ray.num_cpus"
    )


@contextlib.asynccontextmanager
async def hold_devices(config: RunConfig, holder: str) -> AsyncIterator[None]:
    """Hold the run's devices, joining a shared cluster for it; leave the cluster at the end.

    Raises:
        DeviceLockError: another run holds them; names it.
        ConfigError: the cluster cannot be joined or is too small.
    """
    wait_s = config.deadlines.device_lock
    if config.ray.address is None and not ray.is_initialized():
        async with waited_lock(lambda: local_device_lock(holder), wait_s=wait_s):
            yield
        return
    joined = await asyncio.to_thread(connect_ray, config)
    try:
        async with waited_lock(lambda: cluster_device_lock(holder), wait_s=wait_s):
            yield
    finally:
        if joined:
            await _leave_ray()


async def _leave_ray() -> None:
    """Leave the cluster, beside the loop: Ray waits for its own threads."""
    leaving = Ends(budget_s=RAY_END_S, last_s=RAY_END_S)
    leaving.set_last("Ray", ray.shutdown)
    await leaving.run()
