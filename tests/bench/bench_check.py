"""`rollflow check` against an empty `python -c pass`: at most 60 times.

python tests/bench/bench_check.py
"""

import statistics
import subprocess
import sys
import time

PAIRS = 15
MOST = 60.0


def seconds(*arguments):
    """Return how long Python takes with `arguments`."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], capture_output=True, timeout=60, check=True)
    return time.perf_counter() - began


def main():
    """Measure in turn, print the ratio, fail when it is over the bound."""
    ratios = []
    for _ in range(PAIRS):
        empty = seconds("-c", "pass")
        ratios.append(seconds("-m", "flows.cli", "check", "grpo-tiny", "seed=1") / empty)
    ratio = statistics.median(ratios)
    print(
        f"check / python -c pass: {ratio:.1f} ({min(ratios):.1f} to {max(ratios):.1f}, "
        f"{PAIRS} pairs); target at most {MOST:g}"
    )
    return 0 if ratio <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
