"""The gate: is a candidate better than another model on the same prompts?

Both models answered every prompt once, so the outcomes are paired, and prompts on which both did
the same say nothing. Of the others, W are the candidate's and L the other's; were the two equally
good, each would fall to either side with probability 1/2 (exact sign test; McNemar's, where
outcomes are right or wrong):

    p = P(X >= W),  X ~ Binomial(W + L, 1/2)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlcore.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A candidate against another model."""

    against: str
    """What the other is: promoted or base."""
    num_prompts: int
    candidate: float
    """Mean outcome of the candidate."""
    other: float
    """Mean outcome of the other."""
    wins: int
    """Prompts on which the candidate did better."""
    losses: int
    """Prompts on which the other did better."""
    p_value: float
    """Of the exact sign test, one-sided."""
    passes: bool
    """Whether the gain is large enough and not by chance."""

    @property
    def gain(self) -> float:
        """Return by how much the candidate's mean is higher."""
        return self.candidate - self.other

    def line(self) -> str:
        """Return the comparison in words."""
        return (
            f"{self.candidate:.3f} against {self.other:.3f} ({self.against}), gain "
            f"{self.gain:+.3f} on {self.num_prompts} prompts: {self.wins} better, {self.losses} "
            f"worse, p = {self.p_value:.3g}: {'passes' if self.passes else 'does not pass'}"
        )


def sign_test(wins: int, losses: int) -> float:
    """Return P(X >= wins) for X ~ Binomial(wins + losses, 1/2); 1 where nothing differs."""
    n = wins + losses
    return sum(math.comb(n, k) for k in range(wins, n + 1)) / 2**n


def compare(
    candidate: Mapping[str, float],
    other: Mapping[str, float],
    *,
    against: str,
    min_gain: float,
    alpha: float,
) -> Comparison:
    """Compare two models' outcomes per prompt.

    Args:
        candidate: Prompt to outcome, such as 1 for right and 0 for wrong.
        other: The same prompts' outcomes of the other model.
        against: What the other is, for the report.
        min_gain: Least difference of the means.
        alpha: Largest p-value.

    Raises:
        DataError: they did not answer the same prompts.
    """
    if candidate.keys() != other.keys() or not candidate:
        apart = len(candidate.keys() ^ other.keys())
        raise DataError(
            f"outcomes cannot be paired with those of {against}: {len(candidate)} and "
            f"{len(other)} prompts, {apart} of them in one only"
        )
    wins = sum(candidate[prompt] > other[prompt] for prompt in candidate)
    losses = sum(candidate[prompt] < other[prompt] for prompt in candidate)
    n = len(candidate)
    means = sum(candidate.values()) / n, sum(other.values()) / n
    p_value = sign_test(wins, losses)
    return Comparison(
        against=against,
        num_prompts=n,
        candidate=means[0],
        other=means[1],
        wins=wins,
        losses=losses,
        p_value=p_value,
        passes=means[0] - means[1] >= min_gain and p_value <= alpha,
    )
