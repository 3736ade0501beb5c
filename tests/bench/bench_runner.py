"""Overhead per task: PhaseRunner against prefect_ray's stock RayTaskRunner, over paced pages.

Each pair is one page (async subflow) with the stock runner and one with ours, alternating which
comes first; a page runs the 11 phases of a step one after the other with bodies that log one line.
Both have a deadline on every task, ours also fencing and the log relay. Overhead = seconds from
submit to result, mean over the page's tasks. Target: stock / ours >= 10, median over the pairs.
"""

import argparse
import asyncio
import functools
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from typing import Any

TASKS_PER_PAGE = 11
WARM_UP_PAIRS = 3
TARGET_RATIO = 10.0
PACE_S = 1.0
"""Before each page: what the page before left to the server must not be measured with it."""

LOGGER = logging.getLogger("rlcore.bench")


def quantiles(values: list[float]) -> dict[str, float]:
    """Return median, quartiles and extremes, rounded."""
    low, middle, high = statistics.quantiles(values, n=4)
    found = {"min": min(values), "p25": low, "median": middle, "p75": high, "max": max(values)}
    return {name: round(value, 3) for name, value in found.items()}


async def measure(pages: int) -> dict[str, list[float]]:
    """Return milliseconds per task of every measured page, by runner."""
    import ray
    from prefect import flow, get_run_logger, task
    from prefect.cache_policies import NO_CACHE
    from prefect_ray import RayTaskRunner

    from rlcore.cluster.executor import ExecutorPool
    from rlcore.types import CallKey
    from tasks.retry import PHASE_OPTIONS
    from tasks.runner import PhaseRunner, RunnerOptions

    # As many logical CPUs as cores: for more, Ray keeps starting and ending idle workers after the
    # stock runner's pages, which would be measured with ours.
    ray.init(address="local", num_cpus=os.cpu_count(), include_dashboard=False, log_to_driver=False)
    fenced: list[CallKey] = []
    pool = ExecutorPool(2, on_fence=fenced.append)
    await asyncio.to_thread(pool.start)
    phase = functools.partial(
        task,
        cache_policy=NO_CACHE,
        persist_result=False,
        timeout_seconds=60,
        task_run_name="step-{step:04d}/{name}",
        **PHASE_OPTIONS,
    )

    @phase()
    def ours(step: int, name: str) -> int:
        LOGGER.info("phase %s of step %d", name, step)
        return step

    @phase()
    def stock(step: int, name: str) -> int:
        get_run_logger().info("phase %s of step %d", name, step)
        return step

    @flow(persist_result=False, flow_run_name="ours-{step:04d}")
    async def our_page(step: int) -> float:
        began = time.perf_counter()
        for index in range(TASKS_PER_PAGE):
            await ours.submit(step, f"phase-{index}")
        return (time.perf_counter() - began) * 1e3 / TASKS_PER_PAGE

    @flow(persist_result=False, flow_run_name="stock-{step:04d}")
    async def stock_page(step: int) -> float:
        began = time.perf_counter()
        for index in range(TASKS_PER_PAGE):
            future = stock.submit(step, f"phase-{index}")
            await asyncio.to_thread(future.result)
        return (time.perf_counter() - began) * 1e3 / TASKS_PER_PAGE

    runner = PhaseRunner(pool, RunnerOptions(run_id="bench"))
    flows = {
        "ours": our_page.with_options(task_runner=runner),
        "stock": stock_page.with_options(task_runner=RayTaskRunner()),
    }
    taken = await flow(run_pairs, persist_result=False, validate_parameters=False)(flows, pages)
    await asyncio.to_thread(pool.close)
    ray.shutdown()
    return taken


async def run_pairs(
    pages_by_name: dict[str, Callable[[int], Coroutine[Any, Any, float]]], pages: int
) -> dict[str, list[float]]:
    """Run the pages in turn, paced; return what each took."""
    taken: dict[str, list[float]] = {"ours": [], "stock": []}
    for pair in range(WARM_UP_PAIRS + pages):
        for name in ("ours", "stock") if pair % 2 else ("stock", "ours"):
            await asyncio.sleep(PACE_S)
            milliseconds = await pages_by_name[name](pair)
            if pair >= WARM_UP_PAIRS:
                taken[name].append(milliseconds)
    return taken


def main() -> int:
    """Print the figures as one JSON line; exit 1 below the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=50, help="pages per runner")
    pages = parser.parse_args().pages
    with tempfile.TemporaryDirectory() as home:
        # Before Prefect is imported: its database must not land in the user's profile.
        os.environ["PREFECT_HOME"] = home
        os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = "ERROR"  # pages get all
        from prefect.testing.utilities import prefect_test_harness

        with prefect_test_harness(server_startup_timeout=120):
            taken = asyncio.run(measure(pages))
    ratios = [stock / ours for stock, ours in zip(taken["stock"], taken["ours"], strict=True)]
    figures = {
        "bench": "runner",
        "pairs": len(ratios),
        "tasks_per_page": TASKS_PER_PAGE,
        "ours_ms_per_task": quantiles(taken["ours"]),
        "stock_ms_per_task": quantiles(taken["stock"]),
        "ratio": quantiles(ratios),
        "target_ratio": TARGET_RATIO,
    }
    print(json.dumps(figures))
    return 0 if figures["ratio"]["median"] >= TARGET_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
