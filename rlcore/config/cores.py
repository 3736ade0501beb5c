"""Cores of their own for the two sides of a run on CPU whose mode separates them."""

import os
from collections.abc import Mapping, Sequence

from rlcore.config.run import RunConfig

TRAINER = "trainer"

Cores = tuple[int, ...]


def replica_name(index: int) -> str:
    """Return the name of a replica by its number."""
    return f"replica-{index}"


def core_shares(
    config: RunConfig, *, is_separate: bool, cores: Sequence[int] | None = None
) -> Mapping[str, Cores]:
    """Return whose cores are whose; empty: everybody computes on all.

    The trainer has half of this host's cores, and one more of an odd number; the replicas are dealt
    the others. Only on a local cluster: the cores of other hosts are not known here.

    Args:
        config: Of the run.
        is_separate: Whether the mode trains and generates at the same time.
        cores: Numbers of the cores; None: those that this process may use.
    """
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    is_here = config.trainer.device == "cpu" and config.ray.address is None
    if not (is_separate and is_here) or len(cores) < 2:
        return {}
    half = (len(cores) + 1) // 2
    rest, count = cores[half:], config.actor_rollout_ref.rollout.num_replicas
    shares = {TRAINER: tuple(cores[:half])}
    for index in range(count):
        own = rest[index::count] or [rest[index % len(rest)]]
        shares[replica_name(index)] = tuple(own)
    return shares


def threads_on(config: RunConfig, cores: Cores) -> int:
    """Return the threads of a process that has `cores`; empty: it has all.

    Under `full_determinism` the number is that of every process: sums differ with it.
    """
    if not cores or config.actor_rollout_ref.rollout.full_determinism:
        return config.num_threads
    return min(config.num_threads, len(cores))
