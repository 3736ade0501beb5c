"""A shared-memory segment of weights: raw bytes in a reused file, described by a WeightMeta.

Layout: every tensor starts at a multiple of 64 bytes, in the order of `WeightMeta.tensors`. Tensors
of zero size occupy nothing; names tied to one storage share one entry's bytes. The file is never
replaced or shortened: fresh pages cost seven times what warm ones do, so a segment keeps its pages
from one publication to the next. That is why a reader must copy what it reads before the next one
is written (the transaction of `rlcore.checkpoint_engine.manager` sees to it).
"""

import json
import mmap
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcore.errors import WeightSyncError
from rlcore.types import WeightMeta

ALIGNMENT = 64


def write_tensors(
    path: str | Path, tensors: Iterable[tuple[str, Tensor]], dtype: str, version: int
) -> WeightMeta:
    """Write `tensors` to the segment at `path` and return what a reader needs.

    Args:
        path: file in shared memory; created when missing, else overwritten in place.
        tensors: name and tensor; any shape, zero-size and tied ones included.
        dtype: torch's name of the type floating point tensors are cast to, e.g. "bfloat16";
            others keep their type.
        version: weight version of these bytes.

    Raises:
        WeightSyncError: two tensors have one name, `dtype` is not a floating point type, or the
            bytes do not fit into shared memory.
    """
    wire_dtype = _dtype(dtype)
    if not wire_dtype.is_floating_point:
        raise WeightSyncError(f"weights cannot be published as {dtype}: not a floating point type")
    named = list(tensors)
    entries, size = _plan(named, wire_dtype)
    buffer = _open_for_writing(Path(path), size)
    written: set[int] = set()
    for (_, tensor), entry in zip(named, entries, strict=True):
        if entry["num_bytes"] and entry["offset"] not in written:
            _view(buffer, entry).copy_(tensor.detach())
            written.add(entry["offset"])
    checksum = _checksum(buffer, entries)
    return WeightMeta(
        version=version, path=str(path), num_bytes=size, checksum=checksum, tensors=entries
    )


def read_tensors(meta: WeightMeta) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor of every entry, after the checksum of the whole was verified.

    The tensors are views of the segment: copy them before the next publication overwrites it.

    Raises:
        WeightSyncError: the segment is missing, too short or holds other bytes than `meta` says.
    """
    buffer = _open_for_reading(meta)
    found = _checksum(buffer, meta.tensors)
    if found != meta.checksum:
        raise WeightSyncError(
            f"weight version {meta.version}: {meta.path} has checksum {found}, published was "
            f"{meta.checksum}; it was overwritten or damaged"
        )
    for entry in meta.tensors:
        yield entry["name"], _view(buffer, entry)


def _plan(
    named: list[tuple[str, Tensor]], wire_dtype: torch.dtype
) -> tuple[list[dict[str, Any]], int]:
    entries: list[dict[str, Any]] = []
    names: set[str] = set()
    offset_of: dict[tuple[Any, ...], int] = {}
    end = 0
    for name, tensor in named:
        if name in names:
            raise WeightSyncError(f"two tensors are called {name!r}")
        names.add(name)
        dtype = wire_dtype if tensor.is_floating_point() else tensor.dtype
        num_bytes = tensor.numel() * dtype.itemsize
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        offset = offset_of.get(identity) if num_bytes else 0
        if offset is None:
            offset = -(-end // ALIGNMENT) * ALIGNMENT
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


def _open_for_writing(path: Path, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        length = max(size, ALIGNMENT, os.fstat(descriptor).st_size)
        # Reserved now: running out of shared memory in the middle of a copy kills the process.
        os.posix_fallocate(descriptor, 0, length)
        # Never closed by hand: it is unmapped when the last view of it is gone.
        return mmap.mmap(descriptor, length)
    except OSError as error:
        raise WeightSyncError(
            f"cannot reserve {size} bytes for weights at {path}: {error}"
        ) from error
    finally:
        os.close(descriptor)


def _open_for_reading(meta: WeightMeta) -> mmap.mmap:
    try:
        with Path(meta.path).open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            if length < max(meta.num_bytes, ALIGNMENT):
                raise WeightSyncError(
                    f"weight version {meta.version}: {meta.path} has {length} bytes, published "
                    f"were {meta.num_bytes}"
                )
            # Private: torch wants a writable buffer, and what is written never reaches the file.
            return mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise WeightSyncError(
            f"weight version {meta.version}: segment {meta.path} is missing"
        ) from None


def _view(buffer: mmap.mmap, entry: dict[str, Any]) -> Tensor:
    dtype = _dtype(entry["dtype"])
    if not entry["num_bytes"]:
        return torch.empty(entry["shape"], dtype=dtype)
    count = entry["num_bytes"] // dtype.itemsize
    flat = torch.frombuffer(buffer, dtype=dtype, count=count, offset=entry["offset"])
    return flat.view(entry["shape"])


def _checksum(buffer: mmap.mmap, entries: list[dict[str, Any]]) -> str:
    """CRC-32 of the description and of every tensor's bytes, in order (4 GB/s)."""
    value = zlib.crc32(json.dumps(entries, sort_keys=True).encode())
    whole = memoryview(buffer)
    for entry in entries:
        value = zlib.crc32(whole[entry["offset"] : entry["offset"] + entry["num_bytes"]], value)
    return f"crc32:{value:08x}"


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(f"unknown tensor type {name!r}")
    return dtype
