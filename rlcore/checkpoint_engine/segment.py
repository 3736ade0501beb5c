"""A shared-memory segment of weights: raw bytes in a reused file, described by a WeightMeta.

The file is never replaced or shortened: fresh pages cost seven times what warm ones do, so a
segment keeps its pages from one publication to the next. That is why a reader must copy what it
reads before the next one is written (the transaction of `rlcore.checkpoint_engine.manager` sees to
it). Layout of the bytes: `rlcore.checkpoint_engine.layout`.
"""

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from rlcore.checkpoint_engine.buffer import Bytes, checksum
from rlcore.checkpoint_engine.layout import ALIGNMENT, gaps, plan_layout, torch_dtype, view_tensor
from rlcore.errors import WeightSyncError, WeightTransferError
from rlcore.types import WeightMeta

# All pages at once: a fault per page would cost as much as the copy.
_SHARED = mmap.MAP_SHARED | mmap.MAP_POPULATE


def write_tensors(
    path: str | Path, tensors: Iterable[tuple[str, Tensor]], dtype: str, version: int
) -> WeightMeta:
    """Write `tensors` to the segment at `path` and return what a reader needs.

    Args:
        path: file in shared memory; created when missing, else overwritten in place.
        tensors: name and tensor; any shape, zero-size and tied ones included.
        dtype: torch's name of the type floating point tensors are cast to, e.g. "bfloat16";
            others keep their type. "auto": all keep theirs.
        version: weight version of these bytes.

    Raises:
        WeightSyncError: two tensors have one name, `dtype` is not a floating point type, or the
            bytes do not fit into shared memory.
    """
    wire_dtype = None if dtype == "auto" else torch_dtype(dtype)
    if wire_dtype is not None and not wire_dtype.is_floating_point:
        raise WeightSyncError(f"weights cannot be published as {dtype}: not a floating point type")
    named = list(tensors)
    entries, size = plan_layout(named, wire_dtype)
    buffer = open_for_writing(Path(path), size)
    fill(buffer, [tensor for _, tensor in named], entries)
    data = np.frombuffer(buffer, dtype=np.uint8, count=size)
    for start, end in gaps(entries, size):
        data[start:end] = 0  # the same weights have the same checksum, whatever lay here before
    return WeightMeta(
        version=version,
        path=str(path),
        num_bytes=size,
        checksum=checksum(data, entries),
        tensors=entries,
    )


def fill(buffer: Any, tensors: Sequence[Tensor], entries: Sequence[dict[str, Any]]) -> None:
    """Write every tensor to its place in `buffer`, tied ones once, cast to the entry's type."""
    written: set[int] = set()
    for tensor, entry in zip(tensors, entries, strict=True):
        if entry["num_bytes"] and entry["offset"] not in written:
            view_tensor(buffer, entry).copy_(tensor.detach())
            written.add(entry["offset"])


def read_tensors(meta: WeightMeta) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of every entry, after the checksum of the whole was verified.

    The tensors are views of the segment: copy them before the next publication overwrites it.

    Raises:
        WeightSyncError: the segment is missing or too short.
        WeightTransferError: it holds other bytes than `meta` says.
    """
    # Private: torch wants a writable buffer, and what is written never reaches the file.
    buffer = _open_for_reading(meta, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    found = checksum(np.frombuffer(buffer, dtype=np.uint8, count=meta.num_bytes), meta.tensors)
    if found != meta.checksum:
        raise WeightTransferError(mismatch(meta, found))
    for entry in meta.tensors:
        yield entry["name"], view_tensor(buffer, entry)


def map_segment(meta: WeightMeta, *, writable: bool = False) -> Bytes:
    """Return the segment's bytes, not verified.

    Args:
        meta: What was published.
        writable: For libraries that take no read-only memory; they must not write.

    Raises:
        WeightSyncError: the segment is missing or too short.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    buffer = _open_for_reading(meta, _SHARED, protection)
    return np.frombuffer(buffer, dtype=np.uint8, count=meta.num_bytes)


def mismatch(meta: WeightMeta, found: str) -> str:
    """Say that other bytes than the published ones were found."""
    return (
        f"weight version {meta.version}: the bytes of {meta.path} have checksum {found}, "
        f"published was {meta.checksum}; they were overwritten or damaged"
    )


def open_for_writing(path: Path, size: int) -> mmap.mmap:
    """Map the segment at `path`, made or lengthened to hold `size` bytes.

    Raises:
        WeightSyncError: there is no room for it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        length = max(size, ALIGNMENT, os.fstat(descriptor).st_size)
        # Reserved now: running out of shared memory in the middle of a copy kills the process.
        os.posix_fallocate(descriptor, 0, length)
        # Never closed by hand: it is unmapped when the last view of it is gone.
        return mmap.mmap(descriptor, length, flags=_SHARED)
    except OSError as error:
        raise WeightSyncError(
            f"cannot reserve {size} bytes for weights at {path}: {error}"
        ) from error
    finally:
        os.close(descriptor)


def _open_for_reading(meta: WeightMeta, flags: int, protection: int) -> mmap.mmap:
    try:
        mode = "r+b" if flags & mmap.MAP_SHARED and protection & mmap.PROT_WRITE else "rb"
        with Path(meta.path).open(mode) as file:
            length = os.fstat(file.fileno()).st_size
            if length < max(meta.num_bytes, ALIGNMENT):
                raise WeightSyncError(
                    f"weight version {meta.version}: {meta.path} has {length} bytes, published "
                    f"were {meta.num_bytes}"
                )
            return mmap.mmap(file.fileno(), length, flags=flags, prot=protection)
    except FileNotFoundError:
        raise WeightSyncError(
            f"weight version {meta.version}: segment {meta.path} is missing"
        ) from None
