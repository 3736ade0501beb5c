"""The bytes of a set of weights in a process's own memory, and the checksum of such bytes.

The checksum is one hash over the layout and the hashes of all blocks. Blocks are small enough to be
hashed while the processor's cache still holds what a transport has just written, and independent,
so that several threads take part; copying and hashing release the interpreter's lock.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from rlcore.checkpoint_engine.layout import describe
from rlcore.errors import ActorUnavailableError
from rlcore.types import WeightMeta

BLOCK_BYTES = 4 << 20
"""Unit of checksums."""

MAX_THREADS = 4
"""Memory is the limit beyond that."""

MAX_GIVEN_UP = 2
"""Sets of weights that a buffer may have given up; only the end of its process frees them."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A piece of the bytes that travels at once: whole blocks, but for the last one."""

    index: int
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Size of the piece."""
        return self.end - self.start


def split_buckets(num_bytes: int, bucket_bytes: int) -> list[Bucket]:
    """Cut `num_bytes` into buckets of about `bucket_bytes`, a multiple of the block size."""
    size = max(1, bucket_bytes // BLOCK_BYTES) * BLOCK_BYTES
    return [
        Bucket(index=i, start=start, end=min(start + size, num_bytes))
        for i, start in enumerate(range(0, num_bytes, size))
    ]


def checksum(data: Bytes, entries: Sequence[dict[str, Any]]) -> str:
    """Return the checksum of `data` under the layout `entries`."""
    blocks = list(_blocks(0, len(data)))
    with ThreadPoolExecutor(max_workers=_num_threads()) as threads:
        return _combine(threads.map(lambda b: block_digest(data[b[0] : b[1]]), blocks), entries)


def block_digest(data: Bytes) -> bytes:
    """Return the hash of a block."""
    return xxhash.xxh3_64_digest(data.data)


class WeightBuffer:
    """Receives the bytes of a `WeightMeta` and knows their checksum.

    The memory is kept from one set to the next: fresh pages cost several times the copy.

    Example:
        >>> buffer.begin(meta)
        >>> for bucket in split_buckets(meta.num_bytes, 64 << 20):
        ...     buffer.copy(source, bucket)
        >>> buffer.checksum() == meta.checksum
        True
    """

    def __init__(self, digest: Callable[[Bytes], bytes] = block_digest) -> None:
        """Make an empty one; `digest` hashes a block."""
        self._digest = digest
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._given_up: list[torch.Tensor] = []
        self._entries: Sequence[dict[str, Any]] = ()
        self._digests: dict[int, bytes] = {}
        self._threads: ThreadPoolExecutor | None = None
        self.data: Bytes = self._memory.numpy()
        """The bytes of the present set."""

    def begin(self, meta: WeightMeta) -> None:
        """Make room for `meta`; what was held is gone.

        Raises:
            ActorUnavailableError: too much memory is given up. So this counts as lost, and is ended
                and replaced by a process without such a past.
        """
        if len(self._given_up) >= MAX_GIVEN_UP:
            lost_bytes = sum(memory.numel() for memory in self._given_up)
            raise ActorUnavailableError(
                f"process {os.getpid()} takes no more weights: after {len(self._given_up)} "
                f"transfers that broke off {lost_bytes} bytes of its memory may still be written to"
            )
        if self._memory.numel() < meta.num_bytes:
            self._memory = torch.empty(meta.num_bytes, dtype=torch.uint8)
        self.data = self._memory.numpy()[: meta.num_bytes]
        self._entries = meta.tensors
        self._digests.clear()

    def copy(self, source: Bytes, bucket: Bucket) -> None:
        """Take `bucket` from the same place of `source`."""
        self._each_block(bucket, partial(self._copy_block, source))

    def filled(self, bucket: Bucket) -> None:
        """Hash a bucket that a transport has written into `data` itself."""
        self._each_block(bucket, self._hash_block)

    def discard(self) -> None:
        """Give the memory up: somebody may still write to it. It stays allocated for that."""
        if self._memory.numel():
            self._given_up.append(self._memory)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.data = self._memory.numpy()

    def checksum(self) -> str:
        """Return the checksum of what has come; a bucket that is missing changes it."""
        return _combine((self._digests[start] for start in sorted(self._digests)), self._entries)

    def _each_block(self, bucket: Bucket, action: Any) -> None:
        blocks = list(_blocks(bucket.start, bucket.end))
        if len(blocks) == 1:
            action(blocks[0])
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_num_threads(), thread_name_prefix="weights")
        for _ in self._threads.map(action, blocks):
            pass

    def _copy_block(self, source: Bytes, block: tuple[int, int]) -> None:
        np.copyto(self.data[block[0] : block[1]], source[block[0] : block[1]])
        self._hash_block(block)

    def _hash_block(self, block: tuple[int, int]) -> None:
        self._digests[block[0]] = self._digest(self.data[block[0] : block[1]])


def _blocks(start: int, end: int) -> Iterator[tuple[int, int]]:
    for begin in range(start, end, BLOCK_BYTES):
        yield begin, min(begin + BLOCK_BYTES, end)


def _combine(digests: Iterable[bytes], entries: Sequence[dict[str, Any]]) -> str:
    whole = xxhash.xxh3_64(describe(entries))
    for digest in digests:
        whole.update(digest)
    return f"xxh3:{whole.hexdigest()}"


def _num_threads() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))
