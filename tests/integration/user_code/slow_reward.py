"""The share of vowels, found slowly: a run that lasts and leaves the machine to others."""

import time

SECONDS = 1.5


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Return the share of characters that are vowels; a response of the training takes SECONDS."""
    if extra_info["phase"] == "train":
        time.sleep(SECONDS)
    if not solution_str:
        return 0.0
    return sum(letter in ground_truth for letter in solution_str) / len(solution_str)
