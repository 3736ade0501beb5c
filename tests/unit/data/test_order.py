import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.data.order import PromptOrder
from rlcore.errors import DataError

sizes = st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@given(sizes, st.booleans(), st.integers(0, 5))
def test_an_epoch_uses_no_row_twice_and_whole_batches_only(size, shuffle, seed):
    num_rows, batch_size = size
    order = PromptOrder(num_rows, batch_size, shuffle, seed)
    per_epoch = num_rows // batch_size * batch_size
    for epoch in range(3):
        located = [order.locate(epoch * per_epoch + i) for i in range(per_epoch)]
        assert {e for e, _ in located} == {epoch}
        rows = [row for _, row in located]
        assert len(set(rows)) == per_epoch
        assert set(rows) <= set(range(num_rows))


def test_file_order_without_shuffle_drops_the_last_rows():
    order = PromptOrder(num_rows=10, batch_size=4, shuffle=False, seed=0)
    assert order.steps_per_epoch == 2
    assert [order.locate(p) for p in (0, 7, 8, 15, 16)] == [
        (0, 0), (0, 7), (1, 0), (1, 7), (2, 0),
    ]  # fmt: skip


def test_a_position_means_the_same_in_a_new_object_and_another_seed_differs():
    def rows(seed, first, last):
        order = PromptOrder(num_rows=64, batch_size=8, shuffle=True, seed=seed)
        return [order.locate(p)[1] for p in range(first, last)]

    # A resume at 40 continues what a run from 0 would have used.
    assert rows(3, 40, 200) == rows(3, 0, 200)[40:]
    assert rows(3, 0, 64) != rows(4, 0, 64)
    assert rows(3, 0, 64) != rows(3, 64, 128)


def test_fewer_rows_than_a_batch_are_refused():
    with pytest.raises(DataError, match="3 prompts are fewer than one batch of 4"):
        PromptOrder(num_rows=3, batch_size=4, shuffle=False, seed=0)
