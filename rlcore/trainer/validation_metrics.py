"""What sessions of held-out prompts say about a policy: mean, pass@k, best, majority, comparison.

Letters: n sessions of a prompt, c of them solved, k <= n of them asked for. Every `@k` is the exact
mean over all choices of k of the n sessions, without replacement (verl draws with replacement,
which is biased: a session may count twice). A failed session is a session that solved nothing: it
has accuracy 0, casts no vote for an answer, and has no reward.

    pass@k = 1 - C(n - c, k) / C(n, k)                        (Chen et al. 2021, arXiv:2107.03374)
    best@k = sum_i v_(i) C(i - 1, k - 1) / C(n, k)            v_(1) <= ... <= v_(n)
"""

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.types import PromptSpec, SessionRecord

SOLVED = 1.0 - 1e-9
"""Accuracy from which on a session counts as solved."""
MAX_CHOICES = 2_000
"""More choices of k of n than this are drawn at random for maj@k, with a fixed seed."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the chance that at least one of k of n sessions is among the c solved ones."""
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def best_at_k(values: Sequence[float], k: int) -> float:
    """Return the mean over all choices of k values of the largest."""
    n = len(values)
    ordered = sorted(values)
    return sum(v * math.comb(i, k - 1) for i, v in enumerate(ordered)) / math.comb(n, k)


def majority_at_k(votes: Sequence[tuple[Any, float]], k: int) -> float:
    """Return the mean over choices of k sessions of the accuracy of their most frequent answer.

    Args:
        votes: Answer and accuracy of each session; answer None is a vote for nothing. Of answers
            that are equally frequent the one that came first counts.
        k: Sessions that vote.
    """
    n = len(votes)
    if math.comb(n, k) <= MAX_CHOICES:
        choices = list(itertools.combinations(range(n), k))
    else:
        generator = random.Random(k)
        choices = [tuple(sorted(generator.sample(range(n), k))) for _ in range(MAX_CHOICES)]
    total = 0.0
    for choice in choices:
        counts = Counter(votes[i][0] for i in choice)
        winner = counts.most_common(1)[0][0]  # insertion order breaks ties
        total += next(votes[i][1] for i in choice if votes[i][0] == winner)
    return total / len(choices)


def numbers_of_sessions(n: int) -> list[int]:
    """Return the k that are reported: powers of two from 2, and n."""
    return sorted({2**i for i in range(1, n.bit_length()) if 2**i <= n} | {n}) if n > 1 else []


def accuracy_of(record: SessionRecord) -> float:
    """Return a session's accuracy: what the reward function called `acc`, else the reward."""
    if record.is_failed:
        return 0.0
    return float(record.reward_extra.get("acc", record.reward or 0.0))


def validation_metrics(
    specs: Sequence[PromptSpec],
    settled: Mapping[str, list[SessionRecord]],
    base: Mapping[str, float] | None = None,
    answers: Mapping[str, str | None] | None = None,
) -> dict[str, float]:
    """Return metrics per data source, and over all prompts with the standard error.

    The standard error treats prompts as independent: sqrt(p (1 - p) / n) for one session each.

    Args:
        specs: The held-out prompts.
        settled: Uid -> how its sessions ended.
        base: `question_key` -> accuracy of the model the run started with.
        answers: Row key -> answer found in the response, for sessions whose reward function names
            none (`pred`); majority votes are between answers.
    """
    by_source: dict[str, list[PromptSpec]] = defaultdict(list)
    for spec in specs:
        by_source[str(spec.fields.get("data_source", "unknown"))].append(spec)
    metrics: dict[str, float] = {}
    for source, of_source in by_source.items():
        groups = [settled[spec.uid] for spec in of_source]
        metrics |= _of_source(source, groups) | _majorities(source, groups, answers or {})
    everything = [_mean([accuracy_of(r) for r in settled[spec.uid]]) for spec in specs]
    mean = _mean(everything)
    metrics["val-aux/accuracy"] = mean
    metrics["val-aux/accuracy_stderr"] = math.sqrt(
        sum((value - mean) ** 2 for value in everything) / len(everything) ** 2
    )
    records = [record for spec in specs for record in settled[spec.uid]]
    metrics["val-aux/num_prompts"] = float(len(everything))
    metrics["val-aux/failed_sessions"] = float(sum(record.is_failed for record in records))
    turns = [record.num_turns for record in records if not record.is_failed]
    if turns:
        metrics |= {
            "val-aux/num_turns/min": float(min(turns)),
            "val-aux/num_turns/max": float(max(turns)),
            "val-aux/num_turns/mean": _mean(turns),
        }
    if base:
        metrics |= compare_with_base(specs, settled, base)
    return metrics


def compare_with_base(
    specs: Sequence[PromptSpec],
    settled: Mapping[str, list[SessionRecord]],
    base: Mapping[str, float],
) -> dict[str, float]:
    """Return how the prompts that both models answered differ in accuracy, prompt by prompt.

    The standard error is of the mean of the paired differences, so it is smaller than that of two
    independent measurements.
    """
    gains: list[float] = []
    by_source: dict[str, list[float]] = defaultdict(list)
    for spec in specs:
        before = base.get(question_key(spec.index, spec.raw_prompt))
        if before is None:
            continue
        gain = _mean([accuracy_of(r) for r in settled[spec.uid]]) - before
        gains.append(gain)
        by_source[str(spec.fields.get("data_source", "unknown"))].append(gain)
    if not gains:
        return {}
    mean = _mean(gains)
    return {
        "val-aux/gain_over_base": mean,
        "val-aux/gain_over_base_stderr": math.sqrt(
            sum((gain - mean) ** 2 for gain in gains) / len(gains) ** 2
        ),
        "val-aux/better_than_base": float(sum(gain > 0 for gain in gains)),
        "val-aux/worse_than_base": float(sum(gain < 0 for gain in gains)),
        **{f"val-aux/{s}/acc/gain_over_base": _mean(of_s) for s, of_s in by_source.items()},
    }


def question_key(index: int, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return what names a held-out prompt in every validation of a run."""
    return f"{index}\n{messages[-1].get('content')}"


def _of_source(source: str, groups: list[list[SessionRecord]]) -> dict[str, float]:
    """Return the metrics of one data source; `@N` of the most sessions are the core ones."""
    n = max(len(group) for group in groups)
    accuracies = [[accuracy_of(record) for record in group] for group in groups]
    rewards = [[r.reward for r in group if r.reward is not None] for group in groups]
    found = {f"val-core/{source}/acc/mean@{n}": _mean([_mean(a) for a in accuracies])}
    scored = [value for group in rewards for value in group]
    if scored:
        found[f"val-aux/{source}/reward/mean@{n}"] = _mean(scored)
    for k in numbers_of_sessions(n):
        kind = "val-core" if k == n else "val-aux"
        of_k = [a for a in accuracies if len(a) >= k]
        found[f"{kind}/{source}/acc/pass@{k}"] = _mean(
            [pass_at_k(len(a), sum(value >= SOLVED for value in a), k) for a in of_k]
        )
        found[f"{kind}/{source}/acc/best@{k}"] = _mean([best_at_k(a, k) for a in of_k])
        rewarded = [best_at_k(group, k) for group in rewards if len(group) >= k]
        if rewarded:
            found[f"val-aux/{source}/reward/best@{k}"] = _mean(rewarded)
    return found


def _majorities(
    source: str, groups: list[list[SessionRecord]], answers: Mapping[str, str | None]
) -> dict[str, float]:
    """Return maj@k of one data source; nothing if a session's answer is not known."""
    n = max(len(group) for group in groups)
    voted: list[list[tuple[Any, float]]] = []
    for group in groups:
        votes = [_vote(record, answers) for record in group]
        known = [vote for vote in votes if vote is not None]
        if len(known) < len(votes):
            return {}
        voted.append(known)
    return {
        f"{'val-core' if k == n else 'val-aux'}/{source}/acc/maj@{k}": _mean(
            [majority_at_k(votes, k) for votes in voted if len(votes) >= k]
        )
        for k in numbers_of_sessions(n)
    }


def _vote(
    record: SessionRecord, answers: Mapping[str, str | None]
) -> tuple[str | None, float] | None:
    """Return a session's answer and accuracy; None if its answer is not known."""
    if record.is_failed:
        return None, 0.0
    if "pred" in record.reward_extra:
        answer = record.reward_extra["pred"]
        return None if answer is None else str(answer), accuracy_of(record)
    if record.keys and record.keys[-1] in answers:
        return answers[record.keys[-1]], accuracy_of(record)
    return None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
