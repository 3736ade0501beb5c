import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.data.order import PromptOrder, count_earlier, weighted_plan
from rlcore.errors import DataError

sizes = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@settings(deadline=None)
@given(sizes, st.booleans(), st.integers(0, 5))
def test_an_epoch_uses_no_row_twice_and_whole_batches_only(size, shuffle, seed):
    num_rows, batch_size = size
    order = PromptOrder(num_rows, batch_size, shuffle, seed)
    per_epoch = num_rows // batch_size * batch_size
    for epoch in range(3):
        located = [order.locate(epoch * per_epoch + i) for i in range(per_epoch)]
        assert {place.epoch for place in located} == {epoch}
        rows = [place.row for place in located]
        assert len(set(rows)) == per_epoch
        assert set(rows) <= set(range(num_rows))


def test_file_order_without_shuffle_drops_the_last_rows():
    order = PromptOrder(num_rows=10, batch_size=4, shuffle=False, seed=0)
    assert order.steps_per_epoch == 2
    assert [order.locate(p) for p in (0, 7, 8, 15, 16)] == [
        (0, 0, 0), (0, 7, 0), (1, 0, 0), (1, 7, 0), (2, 0, 0),
    ]  # fmt: skip


def test_a_position_means_the_same_in_a_new_object_and_another_seed_differs():
    def rows(seed, first, last):
        order = PromptOrder(num_rows=64, batch_size=8, shuffle=True, seed=seed)
        return [order.locate(p).row for p in range(first, last)]

    # A resume at 40 continues what a run from 0 would have used.
    assert rows(3, 40, 200) == rows(3, 0, 200)[40:]
    assert rows(3, 0, 64) != rows(4, 0, 64)
    assert rows(3, 0, 64) != rows(3, 64, 128)


def test_fewer_rows_than_a_batch_are_refused():
    with pytest.raises(DataError, match="3 prompts are fewer than one batch of 4"):
        PromptOrder(num_rows=3, batch_size=4, shuffle=False, seed=0)


def test_earlier_ones_are_counted():
    assert count_earlier(np.array([3, 1, 3, 3, 1, 0])).tolist() == [0, 0, 1, 2, 1, 0]
    assert count_earlier(np.array([], dtype=np.int64)).tolist() == []


files_and_weights = st.integers(1, 4).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 30), min_size=n, max_size=n),
        st.lists(st.floats(0.01, 10), min_size=n, max_size=n),
    )
)


@settings(deadline=None)
@given(files_and_weights, st.integers(1, 40), st.booleans())
def test_weights_are_shares_of_an_epoch_and_rows_take_turns(sizes_and_weights, count, shuffle):
    rows_per_file, weights = sizes_and_weights
    plan = weighted_plan(rows_per_file, weights, shuffle=shuffle, seed=1)
    firsts = np.cumsum([0, *rows_per_file])
    used = np.zeros(firsts[-1], dtype=int)
    for epoch in range(3):
        rows = plan(epoch, count)
        assert len(rows) == count
        assert np.array_equal(rows, plan(epoch, count))
        np.add.at(used, rows, 1)
    for file, weight in enumerate(weights):
        of_file = used[firsts[file] : firsts[file + 1]]
        # All rows of a file are used before any is used again, over the epochs too.
        assert of_file.max() - of_file.min() <= 1
        share = 3 * count * weight / sum(weights)
        assert abs(of_file.sum() - share) <= len(weights)


def test_weights_without_shuffle_alternate_evenly_in_file_order():
    # Files of 4 and 2 rows (numbers 0-3 and 4-5) in the proportion 2 : 1.
    plan = weighted_plan([4, 2], [2, 1], shuffle=False, seed=0)
    assert plan(0, 6).tolist() == [0, 4, 1, 2, 5, 3]
    order = PromptOrder(
        6, 6, shuffle=False, seed=0, plan=weighted_plan([4, 2], [1, 1], shuffle=False, seed=0)
    )
    assert [tuple(order.locate(p)) for p in range(6)] == [
        (0, 0, 0), (0, 4, 0), (0, 1, 0), (0, 5, 0), (0, 2, 0), (0, 4, 1),
    ]  # fmt: skip
