"""Snapshots: complete or absent, two at most, of this run and user only; where a run goes on."""

import json
import os
import shutil
import socket
import stat
import time

import pytest

from rlcore.errors import CheckpointError, ConfigError, FencedError
from rlcore.testing.tiny_run import tiny_config
from rlcore.trainer.checkpoint import POINTER, CheckpointStore
from rlcore.trainer.run_folder import RunFolder
from rlcore.trainer.snapshot_room import check_room
from rlcore.trainer.snapshots import (
    OWNER,
    SPARE,
    SnapshotStore,
    newest_saved,
    remove_leftovers,
    snapshot_root,
)


def make_folder(path, run_id="r"):
    folder = RunFolder.create(path, run_id=run_id, request={})
    (folder.path / "config.json").write_text("{}")
    folder.begin_attempt(max_attempts=9)
    return folder


@pytest.fixture
def shared(tmp_path):
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "r")


@pytest.fixture
def store(folder, shared):
    return SnapshotStore(folder, shared)


def write_actor(path):
    path.mkdir(exist_ok=True)
    (path / "weights").write_text("w")


def save(store, step, attempt=1, write=write_actor):
    trainer = {"state": {"s": step}, "ledger": {"fed": 8 * step}}
    return store.save(global_step=step, attempt=attempt, trainer=trainer, write_actor=write)


def names(store):
    return sorted(path.name for path in store.root.iterdir())


def test_a_snapshot_holds_what_a_checkpoint_holds_and_is_its_users_alone(store, shared):
    saved = save(store, 3)
    assert saved.load_trainer()["ledger"] == {"fed": 24}
    assert (saved.actor_path / "weights").read_text() == "w"
    assert store.root.parent == shared
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    assert json.loads((store.root / OWNER).read_text()) == {
        "run_folder": str(store.folder.path),
        "run_id": "r",
        "host": socket.gethostname(),
    }
    assert not list(store.folder.path.glob("global_step_*"))


def test_the_older_one_goes_once_the_newer_is_complete(store):
    save(store, 1)
    found = []

    def write(path):
        write_actor(path)
        found.extend(store.steps())

    save(store, 2, write=write)
    assert found == [1]  # while 2 is written
    assert store.steps() == [2]
    assert names(store) == [SPARE, "global_step_2", POINTER, OWNER]


def test_the_ranks_write_over_the_files_of_the_one_before_last(store):
    inodes = []

    def write(path):
        path.mkdir(exist_ok=True)
        found = (path / "weights").exists()
        with (path / "weights").open("r+b" if found else "wb") as file:
            file.write(b"%d" % len(inodes))
        if not inodes:
            (path / "of-another-rank").touch()
        inodes.append((path / "weights").stat().st_ino)

    for step in (1, 2, 3, 4):
        saved = save(store, step, write=write)
    assert inodes[:2] == inodes[2:] and inodes[0] != inodes[1]
    assert (saved.actor_path / "weights").read_bytes() == b"3"
    # What nobody has written this time is of an older one.
    assert [path.name for path in saved.actor_path.iterdir()] == ["weights"]


def test_old_files_are_not_taken_for_those_of_ranks_that_write_elsewhere(store):
    save(store, 1)
    save(store, 2)
    time.sleep(0.02)  # the clock of files moves a few times in it
    with pytest.raises(CheckpointError, match=r"another host .*trainer\.snapshots=false"):
        save(store, 3, write=lambda path: None)
    assert store.latest().global_step == 2


def test_one_that_dies_in_the_middle_leaves_the_older_and_its_remains_go_first(store):
    save(store, 1)

    def die(path):
        write_actor(path)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        save(store, 2, write=die)
    assert store.latest().global_step == 1
    assert len(list(store.root.glob(".global_step_2*"))) == 1
    remains = []

    def write(path):
        write_actor(path)
        remains.extend(name for name in names(store) if name.startswith(".global_step_2"))

    save(store, 2, write=write)
    assert len(remains) == 1  # the one that is written: never three
    assert store.latest().global_step == 2


def test_one_without_the_pointer_is_not_there_yet(store):
    save(store, 1)
    saved = save(store, 2)
    shutil.copytree(saved.path, store.root / "global_step_1")
    (store.root / POINTER).write_text("1")  # as if it had died between rename and pointer
    assert store.latest().global_step == 1


def test_an_older_attempt_writes_none(store):
    save(store, 1)
    store.folder.begin_attempt(max_attempts=9)
    with pytest.raises(FencedError):
        save(store, 2, attempt=1)
    assert store.steps() == [1]


def test_ranks_of_another_host_and_full_memory_are_told_with_the_fix(store):
    with pytest.raises(CheckpointError, match=r"another host .*trainer\.snapshots=false"):
        save(store, 1, write=lambda path: None)

    def full(path):
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"no snapshot can be written: .*No space left"):
        save(store, 1, write=full)


def test_a_run_goes_on_from_the_newest_of_both(folder, store, shared):
    def newest(with_snapshots=True):
        saved = newest_saved(folder, with_snapshots=with_snapshots, shared_memory=shared)
        return None if saved is None else (saved.global_step, saved.path.parent)

    assert newest() is None
    save(CheckpointStore(folder), 2)
    assert newest() == (2, folder.path)
    save(store, 3)
    assert newest() == (3, store.root)
    assert newest(with_snapshots=False) == (2, folder.path)
    save(CheckpointStore(folder), 4)
    assert newest() == (4, folder.path)
    shutil.rmtree(store.root)  # with its host
    assert newest() == (4, folder.path)


def test_an_attempt_that_goes_on_before_it_deletes_it(folder, store):
    checkpoints = CheckpointStore(folder)
    save(checkpoints, 2)
    save(store, 3)
    store.rewind(checkpoints.at(2), attempt=1)
    assert store.steps() == []
    save(store, 3)
    checkpoints.rewind(store.at(3), attempt=1)
    assert (folder.path / POINTER).read_text() == "2"  # the pointer names what is there


def test_a_new_run_in_the_folder_of_an_older_one_does_not_see_its_snapshots(store, shared):
    save(store, 3)
    shutil.rmtree(store.folder.path)
    other = SnapshotStore(make_folder(store.folder.path, "second"), shared)
    assert other.root == store.root
    assert (other.latest(), other.steps()) == (None, [])
    save(other, 1)
    assert other.steps() == [1]


def test_what_another_user_has_put_there_is_neither_read_nor_written(store, monkeypatch):
    save(store, 3)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert (store.latest(), store.steps()) == (None, [])
    with pytest.raises(CheckpointError, match="belongs to another user"):
        save(store, 4)


def test_leftovers_are_those_of_runs_whose_folders_are_gone(tmp_path, store, shared):
    save(store, 1)
    gone = SnapshotStore(make_folder(tmp_path / "gone", "gone"), shared)
    save(gone, 1)
    again = SnapshotStore(make_folder(tmp_path / "again", "again"), shared)
    save(again, 1)
    shutil.rmtree(gone.folder.path)
    shutil.rmtree(again.folder.path)
    make_folder(again.folder.path, "another")
    elsewhere = SnapshotStore(make_folder(tmp_path / "elsewhere", "elsewhere"), shared)
    save(elsewhere, 1)
    owner = json.loads((elsewhere.root / OWNER).read_text())
    (elsewhere.root / OWNER).write_text(json.dumps({**owner, "host": "another-container"}))
    shutil.rmtree(elsewhere.folder.path)
    (shared / "somebody else's").mkdir()
    assert remove_leftovers(shared) == sorted([gone.root, again.root])
    assert store.steps() == [1]
    assert remove_leftovers(shared) == []


def test_what_is_moved_to_disk_is_a_checkpoint_and_frees_the_memory(folder, store):
    save(CheckpointStore(folder), 2)
    save(store, 3)
    store.move_to_disk(1)
    latest = CheckpointStore(folder).latest()
    assert (latest.global_step, latest.load_trainer()["state"]) == (3, {"s": 3})
    assert (latest.actor_path / "weights").read_text() == "w"
    assert not store.root.exists()
    store.move_to_disk(1)  # nothing is there
    save(store, 0)
    store.move_to_disk(1)  # nothing was learnt yet
    assert not store.root.exists()
    assert CheckpointStore(folder).steps() == [2, 3]


def test_two_runs_have_two_places(tmp_path, shared):
    first, second = snapshot_root(tmp_path / "a", shared), snapshot_root(tmp_path / "b", shared)
    assert first != second
    assert first == snapshot_root(tmp_path / "c" / ".." / "a", shared)


def test_a_run_whose_snapshots_do_not_fit_is_refused_before_it_starts(
    tmp_path, folder, store, shared, monkeypatch
):
    config = tiny_config(tmp_path)
    check_room(config, folder, shared)
    usage = shutil.disk_usage(shared)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(ConfigError, match=r"trainer\.snapshots=true: .* has 0\.00 GB free; give"):
        check_room(config, folder, shared)
    check_room(tiny_config(tmp_path, {"trainer.snapshots": False}), folder, shared)
    # What the run has there already is its own room.
    save(store, 1, write=lambda path: (path.mkdir(), (path / "w").write_bytes(bytes(10**8))))
    check_room(config, folder, shared)
