"""Weight updates of SmolLM2 against the bare copies and transfers that they consist of.

    python tests/bench/bench_weights.py [--pairs 7] [--only shm|transaction|gloo|mooncake]

shm          the loops that copy (trainer into the segment, each replica out of it, no checksums)
             against a memcpy of as many bytes: (1 + replicas) times the model
transaction  publish with cast, prepare, load, checksums, commit in embedded engines, against the
             same memcpy
gloo, mooncake  a push to a replica in another process against a bare transfer of as many bytes by
             the same library between two processes
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from rlcore.checkpoint_engine import gloo, mooncake
from rlcore.checkpoint_engine.base import CHECKPOINT_ENGINES, Acknowledgement, TransferSettings
from rlcore.checkpoint_engine.buffer import WeightBuffer
from rlcore.checkpoint_engine.manager import CheckpointEngineManager
from rlcore.checkpoint_engine.segment import fill, open_for_writing, write_tensors
from rlcore.checkpoint_engine.shm import ShmReceiver
from rlcore.rollout.server import LLMServer
from rlcore.rollout.transformers_engine import TransformersEngine
from rlcore.testing.replica_process import PROCESSES, start_replica_process
from rlcore.types import CallKey, WeightMeta

MODEL = "models/smollm2-135m-instruct"
BUCKET = 16 << 20
SETTINGS = TransferSettings(bucket_bytes=BUCKET)
KEY = CallKey(run_id="run", attempt=1, global_step=1, phase="update_weights")


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(name: str, ours: Callable, bare: Callable, pairs: int, target: float) -> bool:
    """Interleave `pairs` pairs after one of each; print ratios bare/ours, the share reached."""
    timed(ours), timed(bare)
    found = []
    for _ in range(pairs):
        a, b = timed(ours), timed(bare)
        found.append((b / a, a, b))
    ratios = sorted(ratio for ratio, _, _ in found)
    median = statistics.median(ratios)
    a, b = (statistics.median(times) for times in list(zip(*found, strict=True))[1:])
    print(
        f"{name}: ours {a * 1e3:.0f} ms, bare {b * 1e3:.0f} ms; ratio median {median:.3f} "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f}, {pairs} pairs), target {target}: "
        f"{'reached' if median >= target else 'NOT reached'}",
        flush=True,
    )
    return median >= target


def memcpy(num_bytes: int, times: int) -> Callable[[], None]:
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)

    def copy() -> None:
        for _ in range(times):
            np.copyto(target, source)

    return copy


def receive_on_demand(pipe: Connection) -> None:
    """A replica's copying half, without checksums."""
    buffer, receiver = WeightBuffer(digest=lambda _: b""), ShmReceiver()
    while (meta := pipe.recv()) is not None:
        buffer.begin(meta)
        for _ in receiver.receive(meta, buffer):
            pass
        pipe.send(None)


def bench_shm(state: dict[str, torch.Tensor], folder: Path, pairs: int) -> bool:
    meta = write_tensors(folder / "w", state.items(), "bfloat16", 1)
    meta = WeightMeta(**{**_fields(meta), "transport": SETTINGS.transport("shm")})
    tensors = list(state.values())
    segment = open_for_writing(folder / "w", meta.num_bytes)
    reached = True
    for count in (1, 2):
        ends = []
        for _ in range(count):
            here, there = PROCESSES.Pipe()
            PROCESSES.Process(target=receive_on_demand, args=(there,), daemon=True).start()
            ends.append(here)

        def ours(ends: list[Connection] = ends) -> None:
            fill(segment, tensors, meta.tensors)
            for end in ends:
                end.send(meta)
            for end in ends:
                end.recv()

        bare = memcpy(meta.num_bytes, 1 + count)
        reached &= compare(f"shm loop, {count} replicas", ours, bare, pairs, 0.5)
        for end in ends:
            end.send(None)
    return reached


def _fields(meta: WeightMeta) -> dict[str, Any]:
    return {name: getattr(meta, name) for name in WeightMeta.__dataclass_fields__}


class LocalReplica:
    """An embedded engine in a server of this process, called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._server = LLMServer(
            lambda: TransformersEngine(MODEL, "bfloat16", 16, 128), run_id="run"
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._server, name)
        return lambda *args: asyncio.run_coroutine_threadsafe(method(*args), self._loop).result()


class Trainer:
    """float32 weights that are published as bfloat16."""

    def __init__(self, state: dict[str, torch.Tensor], folder: Path) -> None:
        self.state = {name: tensor.float() for name, tensor in state.items()}
        self.state["lm_head.weight"] = self.state["model.embed_tokens.weight"]
        self.path = folder / "w"
        self.version = 0

    def publish_weights(self, key: CallKey) -> WeightMeta:
        return write_tensors(self.path, self.state.items(), "bfloat16", self.version)


def bench_transaction(state: dict[str, torch.Tensor], folder: Path, pairs: int) -> bool:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    trainer, reached = Trainer(state, folder), True
    replicas: dict[str, Any] = {}
    for count in (1, 2):
        replicas[f"replica-{count}"] = LocalReplica(loop)
        replicas[f"replica-{count}"].wait_ready(300)
        manager = CheckpointEngineManager(
            trainer, replicas, backend="shm", settings=SETTINGS, key=KEY
        )
        num_bytes = manager.update_weights(0)["bytes"]

        def ours(manager: CheckpointEngineManager = manager) -> None:
            trainer.version += 1
            manager.update_weights(trainer.version)

        bare = memcpy(num_bytes, 1 + count)
        reached &= compare(f"whole transaction by shm, {count} replicas", ours, bare, pairs, 0.2)
    return reached


def bare_gloo_receiver(pipe: Connection, port: int) -> None:
    size = pipe.recv()
    group = gloo.new_pair(dist.TCPStore("127.0.0.1", port, is_master=False), 1, {}, 60.0)
    data = torch.zeros(size, dtype=torch.uint8)
    while pipe.recv():
        for i, start in enumerate(range(0, size, BUCKET)):
            group.recv([data[start : start + BUCKET]], 0, i).wait()
        pipe.send(None)


def bare_gloo(size: int) -> Callable[[], None]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    here, there = PROCESSES.Pipe()
    PROCESSES.Process(target=bare_gloo_receiver, args=(there, store.port), daemon=True).start()
    here.send(size)
    group = gloo.new_pair(store, 0, {}, 60.0)
    data = torch.ones(size, dtype=torch.uint8)

    def send() -> None:
        here.send(True)
        for i, start in enumerate(range(0, size, BUCKET)):
            group.send([data[start : start + BUCKET]], 1, i).wait()
        here.recv()

    return send


def bare_mooncake_receiver(pipe: Connection) -> None:
    session, address, size = pipe.recv()
    engine, data = mooncake.new_engine({}), np.zeros(size, np.uint8)
    mooncake.register(engine, data)
    while pipe.recv():
        for start in range(0, size, BUCKET):
            length = min(BUCKET, size - start)
            place = data.ctypes.data + start
            assert engine.transfer_sync_read(session, place, address + start, length) == 0
        pipe.send(None)


def bare_mooncake(size: int) -> Callable[[], None]:
    engine, data = mooncake.new_engine({}), np.ones(size, np.uint8)
    mooncake.register(engine, data)
    here, there = PROCESSES.Pipe()
    PROCESSES.Process(target=bare_mooncake_receiver, args=(there,), daemon=True).start()
    here.send((f"127.0.0.1:{engine.get_rpc_port()}", data.ctypes.data, size))

    def read() -> None:
        here.send(True)
        here.recv()
        assert engine is not None and len(data) == size  # both live as long as this

    return read


def bench_push(backend: str, state: dict[str, torch.Tensor], folder: Path, pairs: int) -> bool:
    count = sum(tensor.numel() for tensor in state.values())
    specs = [("w", "bfloat16", (count,), None)]
    replica = start_replica_process("replica", folder, specs, deadline_s=120.0)
    weights = torch.ones(count, dtype=torch.bfloat16)
    meta = write_tensors(folder / "w", [("w", weights)], "bfloat16", 1)
    engine = CHECKPOINT_ENGINES.get(backend)(SETTINGS)
    replica.prepare_weights(KEY, 1)

    def ours() -> None:
        outcome = engine.push(KEY, meta, {"replica": replica})["replica"]
        assert isinstance(outcome, Acknowledgement), outcome

    make_bare = {"gloo": bare_gloo, "mooncake": bare_mooncake}[backend]
    try:
        return compare(f"push by {backend}", ours, make_bare(meta.num_bytes), pairs, 0.8)
    finally:
        replica.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    state = {n: t.detach() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    benches = {
        "shm": bench_shm,
        "transaction": bench_transaction,
        "gloo": lambda *args: bench_push("gloo", *args),
        "mooncake": lambda *args: bench_push("mooncake", *args),
    }
    reached = True
    for name, bench in benches.items():
        if options.only in ("", name):
            with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="bench") as folder:
                reached &= bench(state, Path(folder), options.pairs)
    sys.exit(0 if reached else 1)


if __name__ == "__main__":
    main()
