"""A long run of very fast steps: what pages and task runs cost, and whether all are recorded.

2,000 steps of a simulated trainer whose phases take a millisecond, on the pages, tasks, executors
and reports of a real run, with `steps_per_page: auto`, over the embedded server. Prints driver
memory per task run (at most 6 KB), whether the server has recorded every task run, and
milliseconds of a step by part.

    python tests/bench/bench_pages.py [--steps 2000]
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil

from flows.command.environment import prepare_prefect_environment

TARGET_BYTES = 6_000
TASKS_PER_STEP = 10
WARM_UP_STEPS = 200
RECORDED_S = 300.0
"""For the server to record what is on its way when the last step is made."""
SIMULATED = Path(__file__).with_name("simulated_trainer.py")


async def measure(root: Path, steps: int) -> dict[str, float]:
    """Run the steps; return the figures."""
    import ray
    from prefect import flow

    from flows.train_step import train_step
    from rlcore.cluster.executor import ExecutorPool
    from rlcore.testing.tiny_run import tiny_config
    from rlcore.trainer.registered import check_registered
    from rlcore.trainer.run_folder import RunFolder
    from rlcore.user_code import load_user_module
    from tasks.active_run import ACTIVE_RUN, ActiveRun
    from tasks.attempts import this_flow_run

    config = tiny_config(
        root,
        {
            "trainer.user_modules": [str(SIMULATED)],
            "trainer.v1.trainer_mode": "simulated",
            "trainer.total_training_steps": steps,
            "trainer.total_epochs": steps,
            "trainer.steps_per_page": "auto",
            "trainer.save_freq": -1,
            "trainer.test_freq": -1,
            "trainer.logger": ["file"],
        },
    )
    check_registered(config)
    manager = load_user_module(SIMULATED).SimulatedManager()
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    pool = ExecutorPool(2, user_modules=config.python_files)
    await asyncio.to_thread(pool.start)
    cluster = SimpleNamespace(
        executors=pool, ledger=None, training=None, checkpoint_manager=manager, replicas={},
        reward_model=None,
    )  # fmt: skip
    folder = RunFolder.create(root / "runs" / "bench", run_id="bench", request={})
    memory = psutil.Process().memory_info

    @flow(name="bench_pages", persist_result=False)
    async def bench() -> dict[str, float]:
        run = ActiveRun(config=config, folder=folder, attempt=1, cluster=cluster, rows=64)
        ACTIVE_RUN.set(run)
        await run.reporter.begin(0)
        began, warm = time.monotonic(), None
        pages = []
        for first, last in run.pages():
            page_began = time.monotonic()
            page = train_step.with_options(
                task_runner=run.runner, flow_run_name=run.page_name(first, last)
            )
            await page(first_step=first, last_step=last)
            pages.append((first, last, time.monotonic() - page_began))
            if warm is None and last >= WARM_UP_STEPS:
                warm = (last, memory().rss)
        seconds = time.monotonic() - began
        grown = memory().rss - warm[1]
        run.close()
        await run.reporter.end(None)
        tasks = TASKS_PER_STEP * (steps - warm[0])
        missing = await missing_records(this_flow_run().flow_run_id, steps)
        return {
            "steps": steps,
            "pages": len(pages),
            "seconds": round(seconds, 1),
            "bytes_per_task_run": round(grown / tasks),
            "missing_records": missing,
            **milliseconds(folder.path / "metrics.jsonl", pages),
        }

    figures = await bench()
    await asyncio.to_thread(pool.close)
    ray.shutdown()
    return figures


def milliseconds(metrics_file: Path, pages: list[tuple[int, int, float]]) -> dict[str, float]:
    """Return medians over the steps after the warm-up: what a step and its parts take."""
    steps = [json.loads(line) for line in metrics_file.open()]
    steps = [step for step in steps if step["step"] > WARM_UP_STEPS]
    made = {step["step"]: step["timing_s/step"] for step in steps}
    phases = [name for name in steps[0] if name.startswith("timing_s/") and "on_" not in name]
    phases.remove("timing_s/step")
    hooks = [name for name in steps[0] if name.startswith("timing_s/on_")]
    late = [page for page in pages if page[0] > WARM_UP_STEPS]
    around = [
        (seconds - sum(made[step] for step in range(first, last + 1))) / (last - first + 1)
        for first, last, seconds in late
    ]
    parts = {
        "step": [step["timing_s/step"] for step in steps],
        "phase": [statistics.mean(step[name] for name in phases) for step in steps],
        "hook_with_a_task": [step["timing_s/on_step_end"] for step in steps],
        "hook_without": [step["timing_s/on_step_begin"] for step in steps],
        "page_and_report": around,
    }
    assert len(phases) == TASKS_PER_STEP - 2 and len(hooks) == 4, (phases, hooks)
    return {f"ms_{name}": round(1e3 * statistics.median(v), 2) for name, v in parts.items()}


async def missing_records(flow_run_id: str, steps: int) -> int:
    """Return how many task runs the server does not know as Completed, once it has caught up."""
    from prefect.client.orchestration import get_client

    wanted = TASKS_PER_STEP * steps
    body = {
        "flow_runs": {"parent_flow_run_id": {"any_": [flow_run_id]}},
        "task_runs": {"state": {"type": {"any_": ["COMPLETED"]}}},
    }
    ends = time.monotonic() + RECORDED_S
    async with get_client() as client:
        while True:
            found = (await client.request("POST", "/task_runs/count", json=body)).json()
            if found >= wanted or time.monotonic() >= ends:
                return wanted - found
            await asyncio.sleep(1.0)


def main() -> int:
    """Print the figures as one JSON line; exit 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        prepare_prefect_environment(folder)
        from flows.command.embedded_server import start_embedded_server

        start_embedded_server()
        figures = asyncio.run(measure(Path(folder), steps))
    print(json.dumps({"bench": "pages", **figures, "target_bytes": TARGET_BYTES}))
    return int(figures["missing_records"] > 0 or figures["bytes_per_task_run"] > TARGET_BYTES)


if __name__ == "__main__":
    sys.exit(main())
