"""What a worker imports with Python's own garbage collection against ours: at least 1.1 times.

python tests/bench/bench_imports.py
"""

import statistics
import sys

from bench_check import seconds

PAIRS = 7
LEAST = 1.1
IMPORTS = "import rlcore.training.worker"
SELDOM = "from rlcore.cluster.worker_environment import collect_seldom; collect_seldom(); "


def main():
    """Measure in turn, print the ratio, fail when it is below the bound."""
    ratios = []
    for _ in range(PAIRS):
        usual = seconds("-c", IMPORTS)
        ratios.append(usual / seconds("-c", SELDOM + IMPORTS))
    ratio = statistics.median(ratios)
    print(
        f"imports, usual / seldom collection: {ratio:.2f} ({min(ratios):.2f} to "
        f"{max(ratios):.2f}, {PAIRS} pairs); target at least {LEAST:g}"
    )
    return 0 if ratio >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
