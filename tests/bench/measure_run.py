"""Run `rollflow train` as a child and report what it cost: first step, phases, peak memory.

Memory is the proportional set size (PSS) of the whole process tree, so that pages shared between
processes count once. Reported, not a ratio: figures of one machine.

    python tests/bench/measure_run.py grpo-smollm2 seed=0
"""

import json
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import psutil

SAMPLE_S = 2.0
GIB = 1 << 30
MOST_PSS = 10 * GIB


def tree_pss_bytes(process):
    """Return the PSS of a process and all its descendants."""
    total = 0
    for member in [process, *process.children(recursive=True)]:
        try:
            total += member.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total


def main():
    """Run, sample, report."""
    began = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "train", *sys.argv[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    peak = [0]

    def sample():
        process = psutil.Process(child.pid)
        while child.poll() is None:
            try:
                peak[0] = max(peak[0], tree_pss_bytes(process))
            except psutil.NoSuchProcess:
                return
            time.sleep(SAMPLE_S)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    first_step_s = folder = None
    for line in child.stdout:
        print(line, end="", flush=True)
        if first_step_s is None and line.startswith("step    1/"):
            first_step_s = time.monotonic() - began
        if line.startswith("run folder"):
            folder = Path(line.split(maxsplit=2)[2].strip())
    code = child.wait()
    sampler.join()
    print(f"exit code {code}, {time.monotonic() - began:.0f} s in all")
    if first_step_s is not None:
        print(f"first finished step after {first_step_s:.0f} s")
    print(f"peak PSS of the process tree {peak[0] / GIB:.2f} GiB")
    if folder is not None:
        report_phases(folder)
    sys.exit(code or peak[0] > MOST_PSS)


def report_phases(folder):
    """Print the median seconds of every phase over the steps."""
    seconds = defaultdict(list)
    for line in (folder / "metrics.jsonl").open():
        metrics = json.loads(line)
        if metrics["step"] > 0:
            for name, value in metrics.items():
                if name.startswith("timing_s/"):
                    seconds[name.removeprefix("timing_s/")].append(value)
    for name, values in sorted(seconds.items(), key=lambda item: -statistics.median(item[1])):
        median = statistics.median(values)
        print(f"{name:24} median {median:7.3f} s, most {max(values):7.3f} s, {len(values)} times")


if __name__ == "__main__":
    main()
