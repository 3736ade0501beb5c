"""Gain of `separate_async` over `sync` against its bound, in real time.

    python tests/bench/bench_modes.py [--cells 4] [--steps 8]

Whole runs by the command: flow, Ray, ledger, queue, router, weight updates and pages are real;
tokens and training are sleeps (simulated_times.py), so that steps last 6 seconds and more. The
bound of the gain is T_sync / max(G, T_train), where G is the batch's tokens over all slots kept
full; reached is max(G, T_train) / T_async, the mean of a run's steps but the first ones.
"""

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rlcore.data.prepare import prepare_tiny
from rlcore.tracking.curves import read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]
TOKEN_S = 0.02
MEDIAN, LONGEST = 100, 400
BATCH, SESSIONS, SLOTS, REPLICAS = 32, 4, 16, 2
BUDGET, SKIPPED = 2, 3
CELLS = [(1.0, 0.0), (1.0, 1.0), (0.5, 1.0), (2.0, 0.5)]
"""T_train / G, sigma of the lengths."""
TARGET = 0.85
RUN_S = 900.0
"""For one training; it takes two minutes."""


def generation_s(sigma: float) -> float:
    """Return G, expected: seconds that a batch takes over all slots."""
    drawn = random.Random(1)
    lengths = [min(LONGEST, math.exp(drawn.gauss(math.log(MEDIAN), sigma))) for _ in range(20_000)]
    return BATCH * SESSIONS * statistics.mean(lengths) * TOKEN_S / (SLOTS * REPLICAS)


def run(root: Path, mode: str, train_s: float, sigma: float, steps: int) -> tuple[float, float]:
    """Train; return seconds and tokens of a step."""
    (root / "times.json").write_text(
        json.dumps({"token_s": TOKEN_S, "sigma": sigma, "train_s": train_s})
    )
    folder = root / f"{mode}-{train_s:.1f}-{sigma}"
    given = [
        f"trainer.user_modules=[{root / 'simulated_times.py'}]",
        "actor_rollout_ref.rollout.name=sleeping",
        f"trainer.v1.trainer_mode={mode}",
        f"trainer.default_local_dir={folder}",
        f"trainer.total_training_steps={steps}",
        f"trainer.total_epochs={steps}",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.val_before_train=false",
        f"data.train_batch_size={BATCH}",
        f"data.max_response_length={LONGEST}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",
        f"actor_rollout_ref.rollout.n={SESSIONS}",
        f"actor_rollout_ref.rollout.max_num_seqs={SLOTS}",
        f"actor_rollout_ref.rollout.num_replicas={REPLICAS}",
        "ray.num_cpus=16",
    ]
    if mode == "separate_async":
        given += [
            "actor_rollout_ref.rollout.checkpoint_engine.backend=shm",
            "trainer.v1.separate_async.parameter_sync_step=1",
            "trainer.v1.separate_async.in_flight_update=true",
            f"trainer.v1.separate_async.num_warmup_batches={BUDGET}",
            f"trainer.v1.sampler.max_off_policy_threshold={BUDGET + 1}",
            "trainer.v1.sampler.max_off_policy_strategy=pace",
        ]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "flows.cli", "train", "grpo-tiny", *given]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=RUN_S
    )
    if done.returncode:
        raise RuntimeError(f"{mode} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    ends = {line["step"]: line["at"] for line in lines}
    metrics = read_metrics(folder / "metrics.jsonl")
    late = [metrics[step] for step in range(SKIPPED + 1, steps + 1)]
    over = max(step["bench/overtime_s"] for step in late)
    if over > 0:
        print(f"training took {over:.1f} s longer than it should: another cell is meant")
    tokens = statistics.mean(step["response_length/mean"] for step in late) * BATCH * SESSIONS
    return (ends[steps] - ends[SKIPPED]) / (steps - SKIPPED), tokens


def main() -> int:
    """Print the table; exit 1 when a cell misses the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=len(CELLS))
    parser.add_argument("--steps", type=int, default=10)
    chosen = parser.parse_args()
    reached_all = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        prepare_tiny(root)
        shutil.copy(Path(__file__).with_name("simulated_times.py"), root)
        print("T_train/G  sigma   G s  T_sync s  T_async s   gain  bound  share of the bound")
        for share, sigma in CELLS[: chosen.cells]:
            train_s = share * generation_s(sigma)
            t_sync, _ = run(root, "sync", train_s, sigma, SKIPPED + 3)
            t_async, tokens = run(root, "separate_async", train_s, sigma, chosen.steps)
            g = tokens * TOKEN_S / (SLOTS * REPLICAS)
            reached = max(g, train_s) / t_async
            reached_all.append(reached)
            print(
                f"{share:9.2f}  {sigma:5.1f}  {g:4.1f}  {t_sync:8.1f}  {t_async:9.1f}  "
                f"{t_sync / t_async:5.2f}  {t_sync / max(g, train_s):5.2f}  {reached:5.2f} "
                f"(at least {TARGET})",
                flush=True,
            )
    return int(min(reached_all) < TARGET)


if __name__ == "__main__":
    sys.exit(main())
