"""Do the asynchronous modes learn what sync learns? `make learn-async`, 90 minutes on 2 cores.

    python tests/learning/learn_async.py [--seeds 0 1 2] [--modes sync …] [--out FOLDER]

Trains the main job in each mode with each seed for as many steps, and measures greedy accuracy on
512 held-out questions at the end. A run that is there already is not made again, and one that was
stopped goes on: the work can be done in portions. The mean over the seeds of each asynchronous mode
may be at most 5 points below that of sync.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

from rlcore.tracking.curves import read_metrics

MODES = ("sync", "colocate-async", "separate-async")
QUESTIONS = 512
MARGIN = 0.05
RUN_S = 7200.0
"""For one training; it takes ten minutes."""
STALENESS = "training/off_policy/trajectory_staleness_worst/mean"


def train(out: Path, mode: str, seed: int) -> dict[int, dict[str, float]]:
    """Train one run, or find it; return its metrics by step."""
    folder = out / f"{mode}-seed-{seed}"
    finished = folder / "model" / "model.safetensors"
    if not finished.is_file():
        data = out / "data"
        rollflow = [sys.executable, "-m", "flows.cli"]
        subprocess.run(
            [*rollflow, "prepare", "chain_sum", f"out={data}", f"test_size={QUESTIONS}"],
            check=True,
            timeout=RUN_S,
        )
        preset = "grpo-smollm2" if mode == "sync" else f"grpo-smollm2-{mode}"
        given = [
            f"seed={seed}",
            f"data.train_files={data / 'train.parquet'}",
            f"data.val_files={data / 'test.parquet'}",
            "trainer.val_before_train=false",
            "trainer.test_freq=45",
            f"trainer.default_local_dir={folder}",
        ]
        subprocess.run([*rollflow, "train", preset, *given], check=True, timeout=RUN_S)
    return read_metrics(folder / "metrics.jsonl")


def main() -> int:
    """Train, print the table; exit 1 when a mode learns less."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--out", type=Path, default=Path("runs/learn-async"))
    chosen = parser.parse_args()
    accuracies: dict[str, list[float]] = {}
    for seed in chosen.seeds:
        for mode in chosen.modes:
            metrics = train(chosen.out.absolute(), mode, seed)
            last = max(metrics)
            accuracy = metrics[last]["val-aux/accuracy"]
            staleness = [step[STALENESS] for step in metrics.values() if STALENESS in step]
            accuracies.setdefault(mode, []).append(accuracy)
            line = {
                "mode": mode,
                "seed": seed,
                "steps": last,
                "accuracy": round(accuracy, 4),
                "standard_error": round(math.sqrt(accuracy * (1 - accuracy) / QUESTIONS), 4),
                "mean_staleness": round(statistics.mean(staleness), 3) if staleness else None,
            }
            print(json.dumps(line), flush=True)
    means = {mode: statistics.mean(found) for mode, found in accuracies.items()}
    print(json.dumps({"means": {mode: round(mean, 4) for mode, mean in means.items()}}))
    return int(any(mean < means.get("sync", 0.0) - MARGIN for mean in means.values()))


if __name__ == "__main__":
    sys.exit(main())
