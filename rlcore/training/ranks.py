"""The ranks of one training group: who takes part, and what they tell each other.

Every rank runs the same calls in the same order; what differs between ranks (rows, metrics) is
exchanged here, so that decisions (skip a step, return stored metrics) are the same on all. One rank
alone needs no process group: every exchange returns its own part.
"""

import socket
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from rlcore.errors import RankDisagreementError

T = TypeVar("T")

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Where the ranks of a group meet."""

    host: str
    port: int
    rank: int
    size: int
    device: str = "cpu"
    timeout_s: float = 600.0
    """An exchange that takes longer fails: a rank is dead or stuck."""


def reachable_address() -> str:
    """Return an address of this host that its own processes can reach."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


class Ranks:
    """This process's place among the ranks.

    Example:
        >>> Ranks().gather(3)
        [3]
    """

    def __init__(self, rank: int = 0, size: int = 1, device: str = "cpu") -> None:
        self.rank = rank
        self.size = size
        self.device = device

    @classmethod
    def join(cls, place: Rendezvous, store: TCPStore | None = None) -> "Ranks":
        """Enter the group and return when all ranks have.

        Args:
            place: Where they meet.
            store: The opened meeting place, in the process that holds it.
        """
        timeout = timedelta(seconds=place.timeout_s)
        if store is None:
            store = TCPStore(place.host, place.port, is_master=False, timeout=timeout)
        dist.init_process_group(
            BACKENDS[place.device],
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=timeout,
        )
        return cls(place.rank, place.size, place.device)

    def leave(self) -> None:
        """Leave the group."""
        if self.size > 1:
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes what is written once."""
        return self.rank == 0

    def gather(self, own: T) -> list[T]:
        """Return every rank's value, in the order of ranks; any picklable value."""
        if self.size == 1:
            return [own]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own)
        return cast("list[T]", found)

    def agree(self, own: Any, what: str) -> None:
        """Check that all ranks hold the same value.

        Raises:
            RankDisagreementError: they do not; on every rank.
        """
        found = self.gather(own)
        if any(value != found[0] for value in found):
            listed = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(found))
            raise RankDisagreementError(
                f"the ranks of the training group disagree about {what} ({listed}): all of them "
                "must go back to one checkpoint"
            )


def summed(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the sums by name; a name that a part lacks counts 0 there."""
    total: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total[name] + value if name in total else value
    return total
