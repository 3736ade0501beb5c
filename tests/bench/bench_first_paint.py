"""How much longer a browser takes to paint the page of a run with 1,000 pages than one with 10.

Two flow runs on one server with UI, one with 10 subflows and one with 1,000; Debian's Chromium
opens their pages in turn, with an empty cache each time. Prints the median ratio of the first
contentful paint, and that of the moment when the name of a page stands there.

    python tests/bench/bench_first_paint.py [--pages 1000] [--pairs 7]
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

TARGET = 3.0
FEW = 10
WAIT_S = 60.0
STEP = re.compile(r"step-\d{4}")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--enable-unsafe-swiftshader", "--disable-quic",
    "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--window-size=1280,1000",
)  # fmt: skip
PAINTED = (
    "const e = performance.getEntriesByName('first-contentful-paint')[0]; "
    "return e ? e.startTime : null"
)


async def make_runs(pages: int) -> list[str]:
    """Make a run of FEW pages and one of `pages`; return their ids."""
    from prefect import flow

    from tasks.attempts import this_flow_run

    @flow(persist_result=False, flow_run_name="step-{step:04d}")
    async def page(step: int) -> int:
        return step

    @flow(persist_result=False)
    async def run(count: int) -> str:
        for step in range(1, count + 1):
            await page(step)
        flow_run_id = this_flow_run().flow_run_id
        assert flow_run_id is not None
        return flow_run_id

    return [await run(FEW), await run(pages)]


def opened(driver: object, url: str) -> tuple[float, float]:
    """Open a page with nothing cached; return ms to its first paint and to a step's name."""
    driver.execute_cdp_cmd("Network.clearBrowserCache", {})  # type: ignore[attr-defined]
    driver.get("about:blank")  # type: ignore[attr-defined]
    began = time.monotonic()
    driver.get(url)  # type: ignore[attr-defined]
    painted = None
    while painted is None or not STEP.search(driver.page_source):  # type: ignore[attr-defined]
        if time.monotonic() - began > WAIT_S:
            raise TimeoutError(f"{url} did not show its steps within {WAIT_S:.0f} s")
        painted = driver.execute_script(PAINTED)  # type: ignore[attr-defined]
        time.sleep(0.02)
    return float(painted), (time.monotonic() - began) * 1e3


def measure(address: str, runs: list[str], pairs: int) -> list[dict[str, float]]:
    """Open both pages `pairs` times in turn; return the ratios of each pair."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "/usr/bin/chromium"
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
        driver = webdriver.Chrome(options=options, service=service)
        try:
            urls = [f"{address}/v2/runs/flow-run/{run}?tab=SubflowRuns" for run in runs]
            for url in urls:
                opened(driver, url)
            ratios = []
            for pair in range(pairs):
                order = (0, 1) if pair % 2 else (1, 0)
                took = {which: opened(driver, urls[which]) for which in order}
                ratios.append(
                    {
                        "paint_ms_few": took[0][0],
                        "paint_ms_many": took[1][0],
                        "paint": took[1][0] / took[0][0],
                        "names": took[1][1] / took[0][1],
                    }
                )
            return ratios
        finally:
            driver.quit()


def main() -> int:
    """Print the figures as one JSON line; exit 1 above the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=1_000)
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        from flows.command.embedded_server import start_full_server
        from flows.command.environment import prepare_prefect_environment

        os.environ["PREFECT_API_URL"] = start_full_server(folder, port)
        prepare_prefect_environment(Path(folder))
        runs = asyncio.run(make_runs(options.pages))
        ratios = measure(f"http://127.0.0.1:{port}", runs, options.pairs)
    middle = {name: statistics.median(r[name] for r in ratios) for name in ratios[0]}
    spread = [min(r["paint"] for r in ratios), max(r["paint"] for r in ratios)]
    figures = {name: round(value, 2) for name, value in middle.items()}
    print(
        json.dumps(
            {
                "bench": "first_paint", "pages": [FEW, options.pages], "pairs": len(ratios),
                **figures, "paint_spread": [round(s, 2) for s in spread], "target": TARGET,
            }
        )
    )  # fmt: skip
    return int(middle["paint"] > TARGET)


if __name__ == "__main__":
    sys.exit(main())
