"""Where each tensor lies in one run of bytes: the same layout in the segment and in a replica.

Every tensor starts at a multiple of 64 bytes, so that any mix of types and odd sizes can be viewed
in place. Tensors of zero size occupy nothing; names tied to one storage share one entry's bytes.
Transports see the bytes alone: a tensor larger than a bucket is nothing special.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore.errors import WeightSyncError

ALIGNMENT = 64


def plan_layout(
    named: Sequence[tuple[str, Tensor]], wire_dtype: torch.dtype | None
) -> tuple[list[dict[str, Any]], int]:
    """Return an entry per tensor (name, dtype, shape, offset, num_bytes) and the size of all.

    Args:
        named: Name and tensor, in the order of the layout.
        wire_dtype: Type of floating point tensors, others keep theirs; None: all do.

    Raises:
        WeightSyncError: two tensors have one name.
    """
    entries: list[dict[str, Any]] = []
    names: set[str] = set()
    offset_of: dict[tuple[Any, ...], int] = {}
    end = 0
    for name, tensor in named:
        if name in names:
            raise WeightSyncError(f"two tensors are called {name!r}")
        names.add(name)
        dtype = wire_dtype if wire_dtype and tensor.is_floating_point() else tensor.dtype
        num_bytes = tensor.numel() * dtype.itemsize
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        offset = offset_of.get(identity) if num_bytes else 0
        if offset is None:
            offset = aligned(end)
            offset_of[identity] = offset
            end = offset + num_bytes
        entries.append(
            {
                "name": name,
                "dtype": str(dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "offset": offset,
                "num_bytes": num_bytes,
            }
        )
    return entries, end


def aligned(offset: int) -> int:
    """Return the first place at or after `offset` where a tensor may start."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def gaps(entries: Sequence[dict[str, Any]], size: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the bytes between tensors, which belong to none."""
    ends = {entry["offset"] + entry["num_bytes"] for entry in entries if entry["num_bytes"]}
    for end in sorted(ends):
        if end < min(aligned(end), size):
            yield end, min(aligned(end), size)


def view_tensor(buffer: Any, entry: dict[str, Any]) -> Tensor:
    """Return the tensor of `entry` as a view of `buffer` (anything writable that has bytes)."""
    dtype = torch_dtype(entry["dtype"])
    if not entry["num_bytes"]:
        return torch.empty(entry["shape"], dtype=dtype)
    count = entry["num_bytes"] // dtype.itemsize
    flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=entry["offset"])
    return flat.view(entry["shape"])


def describe(entries: Sequence[dict[str, Any]]) -> bytes:
    """Return the layout as bytes, for checksums."""
    return json.dumps(list(entries), sort_keys=True).encode()


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's type of that name.

    Raises:
        WeightSyncError: there is none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(f"unknown tensor type {name!r}")
    return dtype
