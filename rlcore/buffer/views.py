"""verl's attributes of a replay buffer, as read-only views of the ledger."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol


class ViewSource(Protocol):
    """What the views need of the ledger."""

    def view(self, partition_id: str) -> dict[str, Any]:
        """Return uids per status and the tags of stored rows."""
        ...


class _PerPartition(Mapping[str, Any]):
    """One kind of content of every partition, fetched when it is first looked at."""

    def __init__(self, views: "PartitionViews", kind: str) -> None:
        self._views = views
        self._kind = kind

    def __getitem__(self, partition_id: str) -> Any:
        content = self._views._fetch(partition_id)[self._kind]
        if isinstance(content, dict):
            return MappingProxyType(content)
        return tuple(content)

    def __iter__(self) -> Iterator[str]:
        return iter(("train", "val"))

    def __len__(self) -> int:
        return 2


class PartitionViews(ABC):
    """Mixin of ReplayBuffer: what was fetched stays the same until the next synchronisation.

    verl's attributes are sets without order; these are tuples, oldest prompt first. They cannot be
    changed: what `sample` returns is what changes the ledger.
    """

    ledger: Any
    _views: dict[str, dict[str, Any]] | None = None

    @abstractmethod
    def full_partition(self, partition_id: str) -> str:
        """Return the partition's name with the run's prefix."""

    @property
    def partitions(self) -> Mapping[str, Mapping[str, dict[str, Any]]]:
        """Per partition the tags of its stored rows, by row key."""
        return _PerPartition(self, "rows")

    @property
    def pending_keys(self) -> Mapping[str, tuple[str, ...]]:
        """Per partition the uids that wait to be run."""
        return _PerPartition(self, "pending")

    @property
    def running_keys(self) -> Mapping[str, tuple[str, ...]]:
        """Per partition the uids that are run."""
        return _PerPartition(self, "running")

    @property
    def finished_keys(self) -> Mapping[str, tuple[str, ...]]:
        """Per partition the uids that wait to be sampled."""
        return _PerPartition(self, "finished")

    @property
    def failure_keys(self) -> Mapping[str, tuple[str, ...]]:
        """Per partition the uids whose groups failed."""
        return _PerPartition(self, "failure")

    def _sync_metadata_from_transfer_queue(self) -> None:
        """Look anew (verl's name)."""
        self._forget_view()

    def _forget_view(self) -> None:
        self._views = None

    def _fetch(self, partition_id: str) -> dict[str, Any]:
        if self._views is None:
            self._views = {}
        full = self.full_partition(partition_id)
        if full not in self._views:
            self._views[full] = self.ledger.view(full)
        return self._views[full]
