"""Karmarkar-Karp partitions: equal counts, near-equal work, groups together."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlcore.errors import RankDisagreementError
from rlcore.training.balance import (
    balance_metrics,
    balanced_partition,
    balanced_rows,
    shares,
    workload,
)
from rlcore.training.ranks import Ranks, summed


def test_the_work_of_a_row_is_linear_and_quadratic():
    assert workload(100) == 24576 * 100 + 100 * 100


@pytest.mark.parametrize(
    ("work", "parts", "expected"),
    [
        # 8|7, 6|5, 4|0 differ by 1, 1, 4; the largest two: 4+5|0+6 = 9|6, then 9+7|6+8 = 16|14
        ([8, 7, 6, 5, 4], 2, [[0, 2], [1, 3, 4]]),
        ([1, 1, 1, 1], 2, None),
        ([5], 3, [[], [], [0]]),
        ([], 2, [[], []]),
    ],
)
def test_partitions_by_hand(work, parts, expected):
    found = balanced_partition(work, parts)
    assert sorted(itertools.chain(*found)) == list(range(len(work)))
    if expected is not None:
        assert sorted(map(sorted, found)) == expected


@given(st.lists(st.integers(0, 10**6), max_size=40), st.integers(1, 5))
@example([0, 0, 0, 1, 1, 1, 1, 1, 3], 4)
def test_partitions_are_complete_equal_in_count_and_better_than_slices(work, parts):
    found = balanced_partition(work, parts)
    assert sorted(itertools.chain(*found)) == list(range(len(work)))
    sizes = [len(part) for part in found]
    assert max(sizes) - min(sizes) <= 1
    loads = [sum(work[i] for i in part) for part in found]
    # no two loads are further apart than the largest item
    assert max(loads) - min(loads) <= max(work, default=0)
    assert balanced_partition(work, parts) == found


def test_groups_stay_together_where_there_are_enough():
    groups = ["a", "a", "b", "b", "c", "c"]
    parts = balanced_rows(range(6), groups, [10, 10, 20, 20, 30, 30], 2)
    assert sorted(map(len, parts)) == [2, 4] and [4, 5] in parts
    assert sorted(map(len, balanced_rows(range(2), groups, [10] * 6, 2))) == [1, 1]
    assert balanced_rows([3, 1], groups, [10] * 6, 1) == [[3, 1]]


def test_shares_name_the_rows_of_each_step():
    groups, lengths = ["a", "b", "c", "d"], [10, 20, 30, 40]
    found = shares([[0, 1], [2, 3], [0, 3]], groups, lengths, 2)
    for step, rows in enumerate([[0, 1], [2, 3], [0, 3]]):
        own = [[share.rows[i] for i in share.steps[step]] for share in found]
        assert sorted(itertools.chain(*own)) == rows and all(len(part) == 1 for part in own)
    (alone,) = shares([[2, 0], [1, 3]], groups, lengths, 1)
    assert alone.rows == [0, 1, 2, 3] and alone.steps == [[2, 0], [1, 3]]


def test_balance_metrics():
    found = balance_metrics(["a", "b", "c", "d"], [10, 20, 30, 40], 2)
    assert found == {
        "global_seqlen/min": 30,
        "global_seqlen/max": 70,
        "global_seqlen/minmax_diff": 40,
        "global_seqlen/balanced_min": 50,
        "global_seqlen/balanced_max": 50,
        "global_seqlen/mean": 50,
    }


def test_ranks_exchange_and_disagree():
    assert Ranks().gather(3) == [3]
    assert summed([{"a": 1.0, "b": [1]}, {"b": [2]}]) == {"a": 1.0, "b": [1, 2]}
    Ranks().agree((1, 0), "steps")

    class Two(Ranks):
        def gather(self, own):
            return [own, (2, 0)]

    with pytest.raises(RankDisagreementError, match=r"about steps \(rank 0: \(1, 0\), rank 1: "):
        Two().agree((1, 0), "steps")
