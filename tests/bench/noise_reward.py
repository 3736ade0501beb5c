"""A reward without meaning, for benchmarks that need an advantage in every group."""

import hashlib
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    """Return a number in [0, 1) that depends on the whole text of the response."""
    del data_source, ground_truth, extra_info
    digest = hashlib.sha256(solution_str.encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32
