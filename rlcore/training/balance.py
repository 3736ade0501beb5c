"""Which rank works on which rows: equal work, by the largest differencing method.

The rows of a prompt stay together where there are enough prompts, since a rank computes a shared
prompt once. Karmarkar and Karp, "The differencing method of set partitioning", 1982; parts of equal
size as in Michiels et al., https://doi.org/10.1007/978-3-540-24587-2_32.

Legend: L tokens of a row, prompt included.
"""

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

LINEAR_WEIGHT = 24576
"""Work of a row is this times L (matrix products) plus L^2 (attention): a 7-billion-parameter model
as in verl."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one rank does of an inner step."""

    rows: list[int]
    """Numbers, within the batch, of the rows it reads; ascending."""
    steps: list[list[int]]
    """Per optimizer step: positions in `rows` it trains on."""


def workload(length: int) -> int:
    """Return the work that a row of `length` tokens makes, in units of its own."""
    return LINEAR_WEIGHT * length + length * length


def balanced_partition(workloads: Sequence[int], num_parts: int) -> list[list[int]]:
    """Divide items into parts of nearly equal work whose sizes differ by at most one.

    Args:
        workloads: Of each item.
        num_parts: How many parts.

    Returns:
        Item numbers of each part, ascending; parts are empty where items are fewer. The same for
        the same arguments, so that every rank may compute it.
    """
    count = len(workloads)
    # Items of no work fill up the first round, so that a part has one at most; they are dropped.
    padded = [*workloads, *[0] * (-count % num_parts)]
    order = sorted(range(len(padded)), key=lambda item: (padded[item], item < count, item))
    rounds = [order[start : start + num_parts] for start in range(0, len(order), num_parts)]
    heap: list[_Division] = []
    for number, members in enumerate(rounds):
        parts = [_Part(work=padded[item], items=[item]) for item in members]
        heapq.heappush(heap, _Division.of(parts, number))
    if not heap:
        return [[] for _ in range(num_parts)]
    while len(heap) > 1:
        # The two most uneven divisions: the largest part of one meets the smallest of the other.
        first, second = heapq.heappop(heap), heapq.heappop(heap)
        merged = [
            _Part(work=a.work + b.work, items=a.items + b.items)
            for a, b in zip(first.parts, reversed(second.parts), strict=True)
        ]
        heapq.heappush(heap, _Division.of(merged, min(first.number, second.number)))
    return [sorted(item for item in part.items if item < count) for part in heap[0].parts]


@dataclass(slots=True)
class _Part:
    work: int
    items: list[int]


@dataclass(order=True, slots=True)
class _Division:
    """Parts, heaviest first; ordered so that the most uneven division comes out of a heap first."""

    negative_spread: int
    number: int
    parts: list[_Part] = field(compare=False)

    @classmethod
    def of(cls, parts: list[_Part], number: int) -> "_Division":
        parts = sorted(parts, key=lambda part: (-part.work, part.items))
        return cls(parts[-1].work - parts[0].work, number, parts)


def balanced_rows(
    indices: Sequence[int], groups: Sequence[Hashable], lengths: Sequence[int], num_ranks: int
) -> list[list[int]]:
    """Divide the rows `indices` among ranks: whole groups, or rows where groups are too few.

    Args:
        indices: Numbers of the rows to divide.
        groups: Label of each row of the batch.
        lengths: Tokens of each row of the batch.
        num_ranks: How many ranks.
    """
    if num_ranks == 1:
        return [list(indices)]
    members: dict[Hashable, list[int]] = {}
    for row in indices:
        members.setdefault(groups[row], []).append(row)
    units = list(members.values())
    if len(units) < num_ranks:
        units = [[row] for row in indices]
    work = [sum(workload(lengths[row]) for row in unit) for unit in units]
    parts = balanced_partition(work, num_ranks)
    return [[row for unit in part for row in units[unit]] for part in parts]


def shares(
    steps: Sequence[Sequence[int]],
    groups: Sequence[Hashable],
    lengths: Sequence[int],
    num_ranks: int,
) -> list[Share]:
    """Return every rank's share of an inner step.

    Args:
        steps: Row numbers of each optimizer step; a row may be in several (passes over the batch).
        groups: Label of each row of the batch.
        lengths: Tokens of each row of the batch.
        num_ranks: How many ranks.
    """
    divided = [balanced_rows(step, groups, lengths, num_ranks) for step in steps]
    found: list[Share] = []
    for rank in range(num_ranks):
        own = [parts[rank] for parts in divided]
        rows = sorted({row for step in own for row in step})
        position = {row: place for place, row in enumerate(rows)}
        found.append(Share(rows=rows, steps=[[position[row] for row in step] for step in own]))
    return found


def balance_metrics(
    groups: Sequence[Hashable], lengths: Sequence[int], num_ranks: int
) -> dict[str, float]:
    """Return verl's `global_seqlen` metrics: tokens per rank in arriving order, and balanced."""
    size = -(-len(lengths) // num_ranks)
    before = [sum(lengths[rank * size : (rank + 1) * size]) for rank in range(num_ranks)]
    parts = balanced_rows(range(len(lengths)), groups, lengths, num_ranks)
    after = [sum(lengths[row] for row in part) for part in parts]
    return {
        "global_seqlen/min": float(min(before)),
        "global_seqlen/max": float(max(before)),
        "global_seqlen/minmax_diff": float(max(before) - min(before)),
        "global_seqlen/balanced_min": float(min(after)),
        "global_seqlen/balanced_max": float(max(after)),
        "global_seqlen/mean": sum(lengths) / num_ranks,
    }
