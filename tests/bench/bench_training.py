"""The training engine with and without sharing prompts.

An update of groups with the shared prompt computed once (A) against once per response
(B), the same rows, the shape of the SmolLM2 job. Target: at least 3.

Interleaved: one of A, one of B, and so on; the median of the pairs' ratios and their spread.

    python tests/bench/bench_training.py [--pairs 5] [--model DIR]
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rlcore.testing.update_rows import random_rows
from rlcore.training.policy import Policy
from rlcore.training.schedule import LearningRate
from rlcore.training.spec import TrainingSpec
from rlcore.training.update import PolicyUpdater

TARGET = 3.0
NEXT_TO_NOTHING = 1e-30


def updater(model: str, folder: str, tokens: int, packing: str = "shared_prefix") -> PolicyUpdater:
    """Return what makes our optimizer steps."""
    spec = TrainingSpec(
        run_id="bench",
        attempt=1,
        folder=folder,
        model_path=model,
        learning_rate=LearningRate(peak=NEXT_TO_NOTHING),
        micro_batch_tokens=tokens,
        packing=packing,  # type: ignore[arg-type]
    )
    return PolicyUpdater(Policy(model, dtype="bfloat16", packing=spec.packing), spec)


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def pairs(first: Callable[[], object], second: Callable[[], object], count: int) -> list[float]:
    """Return how many times faster `first` is, in `count` interleaved pairs."""
    ratios: list[float] = []
    for _ in range(count):
        own = seconds(first)
        ratios.append(seconds(second) / own)
    return ratios


def report(name: str, ratios: list[float]) -> bool:
    """Print a ratio; return whether the target is reached."""
    median = statistics.median(ratios)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} pairs"
    is_reached = median >= TARGET
    verdict = "reached" if is_reached else "NOT reached"
    print(f"{name}: {median:.2f} ({spread}); target {TARGET:g} {verdict}", flush=True)
    return is_reached


def shared(model: str, folder: str, count: int) -> bool:
    """8 prompts x 8 responses of 12 tokens after 60."""
    rows = random_rows([60] * 64, [12] * 64, per_group=8)
    packed = updater(model, folder, 8192)
    single = updater(model, folder, 8192, packing="padded")
    everything = list(range(64))
    for one in (packed, single):
        one.step(rows, everything, NEXT_TO_NOTHING)
    return report(
        "shared",
        pairs(
            lambda: packed.step(rows, everything, NEXT_TO_NOTHING),
            lambda: single.step(rows, everything, NEXT_TO_NOTHING),
            count,
        ),
    )


def main() -> int:
    """Run the bench; return 1 if the target is missed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    given = parser.parse_args()
    if not Path(given.model).is_dir():
        print(f"{given.model} is not there: run `rollflow prepare smollm2`")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        return 0 if shared(given.model, folder, given.pairs) else 1


if __name__ == "__main__":
    sys.exit(main())
