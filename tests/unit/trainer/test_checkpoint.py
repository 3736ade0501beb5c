"""Checkpoints: complete or absent, pointer last; rotation keeps the best and the referenced."""

import json

import pytest

from rlcore.errors import CheckpointError, FencedError
from rlcore.trainer.checkpoint import POINTER, CheckpointStore, best_step, checkpoint_from_path
from rlcore.trainer.run_folder import RunFolder


@pytest.fixture
def store(tmp_path):
    folder = RunFolder.create(tmp_path / "r", run_id="r", request={})
    (folder.path / "config.json").write_text("{}")
    folder.begin_attempt(max_attempts=9)
    return CheckpointStore(folder)


def write_actor(path):
    path.mkdir()
    (path / "weights").write_text("w")


def save(store, step, attempt=1, write=write_actor):
    return store.save(
        global_step=step,
        attempt=attempt,
        trainer={"state": {"s": step}, "ledger": {"fed": 8 * step}},
        write_actor=write,
    )


def test_latest_follows_the_pointer_and_gives_back_what_was_saved(store):
    assert store.latest() is None
    save(store, 2)
    save(store, 4)
    latest = store.latest()
    assert latest.global_step == 4
    content = latest.load_trainer()
    assert (content["global_step"], content["state"], content["ledger"]) == (
        4,
        {"s": 4},
        {"fed": 32},
    )
    assert (latest.actor_path / "weights").read_text() == "w"


def test_a_save_that_dies_in_the_middle_leaves_the_older_checkpoint(store):
    save(store, 2)

    def die(path):
        path.mkdir()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save(store, 4, write=die)
    assert store.latest().global_step == 2
    assert store.steps() == [2]


def test_an_older_attempt_cannot_move_the_pointer(store):
    save(store, 2)
    store.folder.begin_attempt(max_attempts=9)
    with pytest.raises(FencedError):
        save(store, 4, attempt=1)
    assert (store.folder.path / POINTER).read_text() == "2"
    assert store.steps() == [2]


def hidden(store):
    return sorted(path.name for path in store.folder.path.glob(".global_step_*"))


def test_a_try_that_finds_the_checkpoint_complete_only_sets_the_pointer(store):
    save(store, 2)
    save(store, 4)
    (store.at(4).path / "references" / "promoted").write_text("")
    (store.folder.path / POINTER).write_text("2")  # as if it had died between rename and pointer

    def fail(path):
        raise AssertionError("it is written already")

    assert save(store, 4, write=fail).global_step == 4
    assert store.latest().global_step == 4
    assert (store.at(4).path / "references" / "promoted").exists()
    assert hidden(store) == []


def test_what_another_attempt_left_without_the_pointer_is_replaced_and_stays_referenced(store):
    save(store, 2)
    save(store, 4)
    (store.at(4).path / "references" / "promoted").write_text("")
    (store.folder.path / POINTER).write_text("2")
    store.folder.begin_attempt(max_attempts=9)

    def write(path):
        path.mkdir()
        (path / "weights").write_text("of attempt 2")

    checkpoint = save(store, 4, attempt=2, write=write)
    assert (checkpoint.actor_path / "weights").read_text() == "of attempt 2"
    assert (checkpoint.path / "references" / "promoted").exists()
    assert store.latest().load_trainer()["attempt"] == 2
    assert hidden(store) == []


def test_an_overdue_try_is_left_alone_until_the_training_worker_has_left_it(store):
    def overdue(path):
        path.mkdir()
        (path / "half").write_text("")
        raise TimeoutError("overdue")

    with pytest.raises(TimeoutError):
        save(store, 2, write=overdue)
    (earlier,) = hidden(store)

    def write(path):
        # The worker still writes there when the second try begins, and then serves that one.
        (store.folder.path / earlier / "actor" / "rest").write_text("")
        write_actor(path)

    save(store, 2, write=write)
    assert hidden(store) == []
    assert store.latest().global_step == 2


def test_left_overs_that_cannot_be_deleted_are_told_and_stop_nothing(store, caplog):
    (store.folder.path / ".global_step_1.attempt-7-x.tmp").write_text("no folder")
    save(store, 2)
    assert store.latest().global_step == 2
    assert ".global_step_1.attempt-7-x.tmp cannot be deleted yet" in caplog.text


def test_a_pointer_at_a_missing_checkpoint_falls_back_to_the_newest_before_it(store, caplog):
    for step in (2, 4, 6):
        save(store, step)
    store.at(6).path.rename(store.folder.path / "gone")
    save(store, 8)
    (store.folder.path / POINTER).write_text("6")
    assert store.latest().global_step == 4
    assert "checkpoint 6 is not there; the newest before it is that of step 4" in caplog.text
    (store.folder.path / POINTER).write_text("1")
    with pytest.raises(CheckpointError, match="no complete checkpoint; steps that have one"):
        store.latest()


def test_rotation_keeps_the_newest_the_best_and_the_referenced(store):
    for step in (2, 4, 6, 8, 10):
        save(store, step)
    (store.at(4).path / "references" / "promoted").write_text("")
    assert store.rotate(2, best_step=2) == [6]
    assert store.steps() == [2, 4, 8, 10]
    assert hidden(store) == []
    assert store.rotate(None, best_step=None) == []


def test_going_on_from_an_earlier_checkpoint_puts_the_later_ones_aside(store):
    for step in (5, 10, 15, 20):
        save(store, step)
    store.rewind(store.at(5), attempt=2)
    assert store.latest().global_step == 5
    assert store.steps() == [5]
    save(store, 8)
    assert store.rotate(1, best_step=None) == [5]
    assert store.latest().global_step == 8
    assert (store.folder.path / "abandoned_by_attempt_2" / "global_step_20").is_dir()


def test_rotation_never_deletes_the_checkpoint_that_the_pointer_names(store):
    for step in (2, 4, 6):
        save(store, step)
    store.rewind(store.at(2), attempt=2)
    for step in (3,):
        save(store, step)
    (store.folder.path / POINTER).write_text("2")
    store.rotate(1, best_step=3)
    assert store.latest().global_step == 2


def test_the_best_step_is_one_that_has_a_checkpoint():
    scores = {"0": 0.9, "2": 0.3, "4": 0.5, "6": 0.5}
    assert best_step(scores, among=[2, 4, 6, 8]) == 4
    assert best_step(scores, among=[8]) is None


def test_a_checkpoint_of_another_format_is_refused_by_its_number(store):
    checkpoint = save(store, 2)
    file = checkpoint.path / "trainer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format_version": 99}))
    with pytest.raises(CheckpointError, match="format 99, this version reads 1"):
        checkpoint.load_trainer()


def test_a_path_with_trailing_slash_or_subfolder_names_its_checkpoint(store):
    save(store, 12)
    root = store.folder.path / "global_step_12"
    for path in (root, root / "actor"):
        assert checkpoint_from_path(path).global_step == 12
    with pytest.raises(CheckpointError, match="must be a folder global_step_N"):
        checkpoint_from_path(store.folder.path)


def test_asking_for_a_step_that_was_not_saved_lists_those_that_were(store):
    save(store, 2)
    with pytest.raises(CheckpointError, match=r"steps that have one: \[2\]"):
        store.at(3)
