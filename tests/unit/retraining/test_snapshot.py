import pytest

from rlcore.data.parquet import write_rows
from rlcore.errors import DataError
from rlcore.retraining.snapshot import (
    content_hash,
    freeze_evaluation,
    row_hash,
    rows_of,
    take_snapshot,
)


def row(question, answer="1", **extra):
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": 0, **extra},
    }


def questions(file):
    return sorted(row["prompt"][0]["content"] for row in rows_of([file]))


@pytest.fixture
def root(tmp_path):
    write_rows(tmp_path / "test.parquet", [row("held 1"), row("held 2")])
    return tmp_path / "retraining"


@pytest.fixture
def evaluation(root, tmp_path):
    return freeze_evaluation(root, [tmp_path / "test.parquet"])


def written(tmp_path, name, rows):
    write_rows(tmp_path / name, rows)
    return str(tmp_path / name)


def test_the_hash_is_of_contents_not_of_order_or_files(tmp_path):
    rows = [row(f"q{i}") for i in range(4)]
    assert content_hash(rows) == content_hash(rows[::-1])
    assert content_hash(rows) != content_hash(rows[:3])
    assert content_hash(rows) != content_hash([*rows[:3], row("q3", answer="2")])
    one = written(tmp_path, "one.parquet", rows)
    two = [written(tmp_path, "a.parquet", rows[2:]), written(tmp_path, "b.parquet", rows[:2])]
    assert content_hash(list(rows_of([one]))) == content_hash(list(rows_of(two)))


def test_a_column_that_holds_nothing_does_not_count():
    assert row_hash(row("q", unit=None)) == row_hash(row("q"))


def test_questions_of_the_evaluation_set_are_kept_out(root, evaluation, tmp_path):
    file = written(tmp_path, "new.parquet", [row("held 1", answer="9"), row("a"), row("b")])
    snapshot = take_snapshot(root, [file], evaluation, replay_fraction=0)
    assert questions(snapshot.train_file) == ["a", "b"]
    assert (snapshot.num_new, snapshot.num_held_out, snapshot.num_replayed) == (2, 1, 0)


def test_data_of_nothing_but_held_out_questions_is_refused(root, evaluation, tmp_path):
    file = written(tmp_path, "new.parquet", [row("held 1")])
    with pytest.raises(DataError, match="every row's question is in the evaluation set"):
        take_snapshot(root, [file], evaluation, replay_fraction=0)


def test_a_share_of_older_rows_is_replayed_and_the_same_one_each_time(root, evaluation, tmp_path):
    old = written(tmp_path, "old.parquet", [row(f"old {i}") for i in range(400)])
    take_snapshot(root, [old], evaluation, replay_fraction=0)
    new = written(tmp_path, "new.parquet", [row("new"), row("old 7")])
    snapshots = [take_snapshot(root, [new], evaluation, replay_fraction=0.25) for _ in range(2)]
    first, second = (questions(snapshot.train_file) for snapshot in snapshots)
    assert first == second
    assert 70 <= snapshots[0].num_replayed <= 130  # 100 of 400, give or take 3 sigma of 8.7
    assert first.count("old 7") == 1
    assert snapshots[0].data_hash == snapshots[1].data_hash
    everything = take_snapshot(root, [new], evaluation, replay_fraction=1)
    assert everything.num_replayed == 399  # all but the one that is new as well
    none = take_snapshot(root, [new], evaluation, replay_fraction=0)
    assert questions(none.train_file) == ["new", "old 7"]


def test_the_evaluation_set_is_frozen(root, evaluation, tmp_path):
    again = freeze_evaluation(root, [tmp_path / "test.parquet"])
    assert again == evaluation
    write_rows(tmp_path / "test.parquet", [row("held 1"), row("held 3")])
    with pytest.raises(DataError, match=r"data.val_files has hash .* frozen at"):
        freeze_evaluation(root, [tmp_path / "test.parquet"])
    write_rows(evaluation.path, [row("other")])
    with pytest.raises(DataError, match=r"evaluation/test.parquet has hash"):
        freeze_evaluation(root, [tmp_path / "test.parquet"])
