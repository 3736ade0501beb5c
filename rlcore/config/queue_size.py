"""How many rows the queue holds, and how large one is."""

from typing import Final

from rlcore.config.run import RunConfig
from rlcore.schema import COLUMNS

_BYTES: Final = {"int64": 8, "float32": 4}
_MOONCAKE_ENTRY: Final = 128
"""Bytes that a Mooncake store may lose to alignment per stored column of a row."""
_MOONCAKE_SHARE: Final = 0.9
"""Of its segment that a Mooncake store fills before it would throw out rows."""


def row_bytes(config: RunConfig) -> int:
    """Return the bytes of the longest trajectory with every column."""
    lengths = {"S": config.data.max_prompt_length, "T": config.data.max_response_length}
    return sum(_BYTES[column.dtype] * lengths[column.length] for column in COLUMNS.values())


def queue_capacity(config: RunConfig) -> int | None:
    """Return the rows that the queue holds at most; None: no limit."""
    backend = config.transfer_queue.backend
    if backend.storage_backend == "SimpleStorage":
        return backend.SimpleStorage.total_storage_size
    stored = row_bytes(config) + _MOONCAKE_ENTRY * len(COLUMNS)
    return int(backend.MooncakeStore.global_segment_size * _MOONCAKE_SHARE) // stored
