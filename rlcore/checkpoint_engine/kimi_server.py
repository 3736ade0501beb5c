"""A process with one ParameterServer of checkpoint-engine, which serves one GPU.

The only place where that package is imported, and what the import does to this process is meant for
such processes alone. What it gets as tensors are the buckets of the
segment, as bytes and in their order: types, ties and tensors larger than a bucket are the layout's
business, as with every other backend.
"""

import importlib
import os
import select
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from rlcore.checkpoint_engine.buffer import split_buckets
from rlcore.checkpoint_engine.segment import map_segment
from rlcore.tcp_store import open_store
from rlcore.types import WeightMeta

LOOPBACK = "127.0.0.1"
GIB = 1 << 30

# Read when the package's logger is imported: it tells of every bucket otherwise.
os.environ.setdefault("LOGURU_LEVEL", "ERROR")
# Without RDMA its store between hosts fails at the start where Mooncake is installed; it does
# without where it is not. One server per replica never uses it.
sys.modules["mooncake"] = None  # pyright: ignore[reportArgumentType]
package: Any = importlib.import_module("checkpoint_engine.ps")


def serve(requests: Connection, place: str, owner: int, mem_fraction: float) -> None:
    """Serve the sending process until it is gone; the main function of this process.

    Args:
        requests: (meta, bucket_bytes, deadline_s) come in; for each ("socket", name) and then
            ("end", error or None) go out.
        place: The GPU, by its identity.
        owner: Number of the sending process.
        mem_fraction: Share of the GPU's free memory that may be taken.
    """
    threading.Thread(target=_end_with, args=(owner,), daemon=True).start()
    os.environ["CUDA_VISIBLE_DEVICES"] = place
    # A world of one process listens nowhere else.
    os.environ.update(NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo", RANK="0")
    server = new_server(mem_fraction)
    number = 0
    while True:
        meta, bucket_bytes, deadline_s = requests.recv()
        number += 1
        try:
            update(server, f"push-{number}", meta, bucket_bytes, deadline_s, requests)
        except Exception as error:  # noqa: BLE001 - the package may raise anything; it is reported
            requests.send(("end", f"{type(error).__name__}: {error}"))
        else:
            requests.send(("end", None))


def new_server(mem_fraction: float) -> Any:
    """Return a ParameterServer of a world of one, whose store listens on loopback.

    torch's own listens on all interfaces, and asks nobody who he is.
    """
    torch_dist: Any = dist
    original = torch_dist.TCPStore
    torch_dist.TCPStore = lambda *_args, **_kwargs: open_store(LOOPBACK)
    try:
        return package.ParameterServer(
            world_size=1, master_addr=LOOPBACK, master_port=0, mem_fraction=mem_fraction
        )
    finally:
        torch_dist.TCPStore = original


def update(
    server: Any,
    name: str,
    meta: WeightMeta,
    bucket_bytes: int,
    deadline_s: float,
    requests: Connection,
) -> None:
    """Offer the segment to one replica, which is told where by ("socket", name); wait for it.

    Raises:
        Exception: of the package.
    """
    data = torch.from_numpy(map_segment(meta, writable=True))
    buckets = split_buckets(meta.num_bytes, bucket_bytes)
    named = {f"{bucket.index:09d}": data[bucket.start : bucket.end] for bucket in buckets}
    # Buckets of the package's are at least as large as a tensor: one tensor each.
    os.environ["PS_MAX_BUCKET_SIZE_GB"] = repr(buckets[0].num_bytes / GIB)

    def tell(sockets: Sequence[tuple[str, str]]) -> None:
        ((_, socket),) = sockets
        requests.send(("socket", socket))

    # Its pinned memory is kept from one push to the next.
    server.register_checkpoint(name, named_tensors=named, use_shared_memory_pool=True)
    server.gather_metas(name)
    server.update(name, tell, timeout=timedelta(seconds=deadline_s))
    server.unregister_checkpoint(name)


def _end_with(owner: int) -> None:
    """End this process when the sending one is dead, also in the middle of an update."""
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)
    select.select([descriptor], [], [])
    os._exit(1)
