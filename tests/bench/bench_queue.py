"""From the last finished group to the batch in hand; rows put and got against the bare package.

    python tests/bench/bench_queue.py [--pairs 40]

batch    a worker settles the last prompt while a step waits in `ReplayBuffer.sample`: seconds from
         the call of `settle` to the batch, rows looked up in the queue, against the average of
         empty calls to the same ledger just before and just after
put, get  rows of trajectories through QueueClient (checks of columns, types and lengths, a
         deadline, copies) against kv_batch_put and kv_batch_get of TransferQueue, the same columns
         of the same rows, 8 to 256 in a batch
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

from rlcore.buffer.replay_buffer import ReplayBuffer
from rlcore.buffer.transfer_queue import QueueClient
from rlcore.cluster.ledger import start_ledger
from rlcore.cluster.queue_host import start_queue_host, stop_queue_host
from rlcore.testing.ledger import prompt_spec, sessions_of
from rlcore.types import CallKey

TRAIN = "run-1/train"
GROUPS, SESSIONS, TOKENS, CALLS = 8, 2, 256, 20
TARGETS = {"batch": 5.0, "put": 1.2, "get": 1.2}
COLUMNS = {
    "prompts": torch.int64,
    "responses": torch.int64,
    "response_mask": torch.int64,
    "rollout_log_probs": torch.float32,
}


def timed(work: Callable[[], object]) -> float:
    """Return seconds of `work`."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def columns_of(count: int) -> dict[str, list[torch.Tensor]]:
    """Return columns of `count` rows whose responses differ in length."""
    lengths = [TOKENS // 2 + index % (TOKENS // 2) for index in range(count)]
    return {
        name: [torch.ones(64 if name == "prompts" else length, dtype=dtype) for length in lengths]
        for name, dtype in COLUMNS.items()
    }


def report(name: str, ratios: list[float], target: float, **more: Any) -> bool:
    """Print median and spread; return whether the target is met."""
    found = statistics.median(ratios)
    said = "".join(f" {key}={value}" for key, value in more.items())
    print(
        f"{name}: {found:.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} pairs; "
        f"at most {target:g}){said}"
    )
    return found <= target


def bench_batch(pairs: int) -> bool:
    """Time from a settled prompt to the step's batch, in empty calls to the ledger."""
    ledger = start_ledger("run-1", str(Path(tempfile.mkdtemp()) / "journal"), 1)
    queue = QueueClient(deadline_s=20)
    buffer = ReplayBuffer(ledger, run_id="run-1", attempt=1, rows=queue, deadline_s=30)
    ratios = []
    for step in range(1, pairs + 2):
        key = CallKey(run_id="run-1", attempt=1, global_step=step, phase="bench")
        ledger.feed(key, [prompt_spec(f"{step}x{i}", global_step=step) for i in range(GROUPS)])
        uids = [spec.uid for spec in ledger.claim(1, "w", GROUPS)]
        rows = [f"{uid}_{i}_0" for uid in uids for i in range(SESSIONS)]
        queue.put(TRAIN, rows, columns_of(len(rows)), create=True)
        for uid in uids[:-1]:
            ledger.settle("w", uid, sessions_of(uid, num=SESSIONS))
        came: list[float] = []

        def wait(step: int = step, came: list[float] = came) -> None:
            buffer.sample(step, "train", GROUPS)
            came.append(time.perf_counter())

        before = [timed(ledger.ping) for _ in range(CALLS)]
        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.05)  # it waits in the ledger by then
        last = sessions_of(uids[-1], num=SESSIONS)
        began = time.perf_counter()
        ledger.settle("w", uids[-1], last)
        waiter.join(30)
        empty = statistics.mean(before + [timed(ledger.ping) for _ in range(CALLS)])
        ratios.append((came[0] - began) / empty)
        ledger.mark_trained(key, step)
    return report("batch", ratios[1:], TARGETS["batch"])


def bench_rows(pairs: int) -> bool:
    """Put and get batches of rows by our client and by the package's own calls, in turns."""
    queue = QueueClient(deadline_s=60)
    tq.init()  # attaches to the host's queue
    met = True
    for count in (8, 64, 256):
        columns = columns_of(count)
        names = list(columns)
        keys = [f"{count}x{i}_0_0" for i in range(count)]
        ratios: dict[str, list[float]] = {"put": [], "get": []}
        for pair in range(pairs + 1):
            ours = [f"o{pair}{key}" for key in keys]
            bare = [f"b{pair}{key}" for key in keys]

            def put_bare(bare: list[str] = bare, columns: dict[str, Any] = columns) -> None:
                nested = {
                    name: torch.nested.as_nested_tensor(rows, layout=torch.jagged)
                    for name, rows in columns.items()
                }
                tq.kv_batch_put(bare, TRAIN, TensorDict(nested, batch_size=[len(bare)]))

            turns = {
                "put": (
                    lambda ours=ours, c=columns: queue.put(TRAIN, ours, c, create=True),
                    put_bare,
                ),
                "get": (
                    lambda ours=ours, n=names: queue.get(TRAIN, ours, n),
                    lambda bare=bare, n=names: tq.kv_batch_get(bare, TRAIN, n),
                ),
            }
            for name, (with_ours, with_bare) in turns.items():
                first, second = (with_ours, with_bare) if pair % 2 else (with_bare, with_ours)
                seconds = timed(first), timed(second)
                seconds = seconds if pair % 2 else seconds[::-1]
                if pair:  # the first is a warm-up
                    ratios[name].append(seconds[0] / seconds[1])
            queue.clear(TRAIN, ours + bare)
        for name, found in ratios.items():
            met &= report(name, found, TARGETS[name], rows=count)
    return met


def main() -> int:
    """Print the ratios; exit 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    pairs = parser.parse_args().pairs
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    start_queue_host("run-1", 1)
    try:
        met = [bench_batch(pairs), bench_rows(pairs)]
    finally:
        stop_queue_host("run-1", 1)
        ray.shutdown()
    return int(not all(met))


if __name__ == "__main__":
    sys.exit(main())
