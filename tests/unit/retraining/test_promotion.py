import json
import os

import fsspec
import pytest

from rlcore.errors import CheckpointError
from rlcore.retraining.promotion import PromotedStore


@pytest.fixture
def models(tmp_path):
    for name in ("a", "b"):
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"model": name}))
        (folder / "model.safetensors").write_bytes(name.encode() * 10)
    return tmp_path / "models"


@pytest.fixture(params=["local", "url"])
def store(request, tmp_path):
    if request.param == "local":
        yield PromotedStore(str(tmp_path / "store"))
        return
    yield PromotedStore("memory://store")
    fsspec.filesystem("memory").store.clear()


def served(store, tmp_path):
    path = store.model_path(tmp_path / "cache")
    return json.loads((path / "config.json").read_text())["model"]


def test_nothing_is_promoted_at_first(store, tmp_path):
    assert store.current() is None
    assert store.model_path(tmp_path / "cache") is None
    with pytest.raises(CheckpointError, match="no promotion to go back to"):
        store.rollback()


def test_promotion_switches_and_rollback_goes_back(store, models, tmp_path):
    store.promote("run-a", models / "a", reason="gate")
    assert served(store, tmp_path) == "a"
    store.promote("run-b", models / "b", reason="approved by hand")
    assert served(store, tmp_path) == "b"
    now = store.current()
    assert (now.candidate, now.reason) == ("run-b", "approved by hand")
    assert [entry["candidate"] for entry in now.history] == ["run-a"]
    assert store.rollback().candidate == "run-a"
    assert served(store, tmp_path) == "a"
    with pytest.raises(CheckpointError, match="no promotion to go back to"):
        store.rollback()
    store.promote("run-b", models / "b", reason="again")
    assert served(store, tmp_path) == "b"


def test_promoting_the_current_one_again_changes_nothing(store, models):
    first = store.promote("run-a", models / "a", reason="gate")
    assert store.promote("run-a", models / "a", reason="other") == first
    assert store.current() == first


def test_a_folder_without_a_model_is_refused(store, tmp_path):
    with pytest.raises(CheckpointError, match=r"no config.json"):
        store.promote("run-a", tmp_path / "none", reason="gate")
    assert store.current() is None


def test_a_local_store_has_a_link_for_readers_and_leaves_no_rests(models, tmp_path):
    store = PromotedStore(str(tmp_path / "store"))
    for name in ("a", "b"):
        store.promote(f"run-{name}", models / name, reason="gate")
        link = tmp_path / "store" / "current"
        assert json.loads((link / "config.json").read_text())["model"] == name
    assert sorted(os.listdir(tmp_path / "store")) == ["current", "current.json", "versions"]
    assert sorted(os.listdir(tmp_path / "store" / "versions")) == ["run-a", "run-b"]


def test_a_version_that_was_written_half_is_written_again(models, tmp_path):
    store = PromotedStore(str(tmp_path / "store"))
    half = tmp_path / "store" / "versions" / "run-a"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    store.promote("run-a", models / "a", reason="gate")
    assert (half / "model.safetensors").read_bytes() == b"a" * 10


def test_a_pointer_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "current.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"current.json cannot be read"):
        PromotedStore(str(tmp_path)).current()
