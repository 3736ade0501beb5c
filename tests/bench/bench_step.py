"""A step of a run against the same phases called bare.

A: the step as users run it: a page of Prefect, one task run per phase, bodies in Ray executors.
B: the same phases and hooks called one after the other in this process: no Prefect, no executor,
   the same ledger, queue, trainer, engine and producers.
Interleaved in one run: one step of A, one of B, and so on. Prints the median ratio A / B.

Both sides of a pair have to do equal work, which training does not: the update leaves out groups
whose sessions all score the same, and responses change their length as the policy learns. So the
learning rate is next to nothing and the reward is noise, by which every group has an advantage.

    python tests/bench/bench_step.py [PRESET] [--pairs 6] [key=value ...]
"""

import argparse
import asyncio
import copy
import statistics
import sys
import tempfile
import time
from pathlib import Path

from flows.command.environment import prepare_prefect_environment

TARGET = 1.05

FIRST = 2
"""Steps that warm both sides up before the first pair."""
NEXT_TO_NOTHING = 1e-30
NOISE = Path(__file__).with_name("noise_reward.py")


def bare_step(run, step):
    """Run one step without Prefect and executors."""
    from rlcore.trainer.phases import (
        ADD_BATCH,
        COMMIT_STEP,
        SAMPLE_BATCH,
        SAVE_SNAPSHOT,
        active_batch_phases,
        run_phase,
    )

    trainer = copy.copy(run.trainer)
    trainer.global_steps = step
    trainer.checkpoint_manager = run.cluster.checkpoint_manager.with_key(run.key("bare"))

    def phase(phase, batch=None):
        key = run.key(phase.name)
        result = run_phase(trainer, phase, key, batch, deadline_s=1800)
        return result.batch or batch

    trainer.on_step_begin()
    phase(ADD_BATCH)
    trainer.on_sample_begin()
    batch = phase(SAMPLE_BATCH)
    trainer.on_sample_end()
    for each in active_batch_phases(trainer):
        phase(each, batch)
    if run.config.trainer.snapshots:
        phase(SAVE_SNAPSHOT)
    phase(COMMIT_STEP)
    trainer.on_step_end()
    run.trainer.state = trainer.state


async def measure(preset, overrides, pairs):
    """Return the seconds of each pair (A, B)."""
    from prefect import flow

    from flows.rollout_producer import rollout_producers
    from flows.train_step import start_run, train_step
    from tasks.lifecycle import open_run

    @flow(name="bench_step", persist_result=False)
    async def bench():
        seconds = []
        async with open_run(preset, overrides, None, None) as run, rollout_producers(run):
            await start_run.with_options(task_runner=run.runner)(step=0)
            page = train_step.with_options(task_runner=run.runner)
            for step in range(1, FIRST + 2 * pairs + 1):
                began = time.perf_counter()
                # A B, B A, A B, ...: neither side is always the second of its pair.
                if (step % 2 == 1) == ((step - 1) // 2 % 2 == 0):
                    await page(first_step=step, last_step=step)
                    side = "page"
                else:
                    run.trainer.global_steps = step
                    await asyncio.to_thread(bare_step, run, step)
                    side = "bare"
                seconds.append((side, time.perf_counter() - began))
        return seconds[FIRST:]

    seconds = await bench()
    chunks = [dict(seconds[i : i + 2]) for i in range(0, len(seconds), 2)]
    return [(pair["page"], pair["bare"]) for pair in chunks]


def main():
    """Print the ratio of the two sides."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset", nargs="?", default="grpo-smollm2")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--pairs", type=int, default=6)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        prepare_prefect_environment(folder)
        from rlcore.config.overrides import overrides_as_dict

        overrides = {
            "trainer.runs_root": folder,
            "trainer.val_before_train": False,
            "trainer.save_freq": -1,
            "trainer.test_freq": -1,
            "trainer.logger": ["file"],
            "trainer.total_training_steps": FIRST + 2 * options.pairs,
            "actor_rollout_ref.actor.optim.lr": NEXT_TO_NOTHING,
            "reward.custom_reward_function.path": str(NOISE),
            **overrides_as_dict(options.overrides),
        }
        pairs = asyncio.run(measure(options.preset, overrides, options.pairs))
    ratios = [a / b for a, b in pairs]
    for number, (a, b) in enumerate(pairs, start=1):
        print(f"pair {number}: page {a:.2f} s, bare {b:.2f} s, ratio {a / b:.3f}")
    print(
        f"step of {options.preset}, page against bare phases: median ratio "
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}, "
        f"{len(ratios)} pairs), at most {TARGET}"
    )
    sys.exit(0 if statistics.median(ratios) <= TARGET else 1)


if __name__ == "__main__":
    main()
