"""Which run an attempt belongs to."""

import pytest

from rlcore.config import load_config
from rlcore.errors import CheckpointError, ConfigError
from rlcore.trainer.checkpoint import CheckpointStore
from rlcore.trainer.run_folder import RunFolder
from rlcore.trainer.which_run import which_run


def config(root, **trainer):
    keys = {f"trainer.{name}": str(value) for name, value in trainer.items()}
    return load_config("grpo-tiny", {"trainer.runs_root": str(root / "runs"), **keys})


def make_run(path, run_id, *steps):
    folder = RunFolder.create(path, run_id=run_id, request={})
    (folder.path / "config.json").write_text("{}")
    folder.begin_attempt(max_attempts=9)
    for step in steps:
        CheckpointStore(folder).save(
            global_step=step, attempt=1, trainer={"state": {}, "ledger": {}},
            write_actor=lambda path: path.mkdir(),
        )  # fmt: skip
    return folder


def test_a_start_makes_a_new_run_under_the_runs_root(tmp_path):
    found = which_run(config(tmp_path), None)
    assert found.is_new
    assert found.checkpoint is None
    assert found.path == tmp_path / "runs" / found.run_id


def test_resume_continues_the_last_checkpoint_or_starts_over_without_one(tmp_path):
    make_run(tmp_path / "runs" / "a", "a", 2, 4)
    found = which_run(config(tmp_path), "a")
    assert (found.run_id, found.is_new, found.checkpoint.global_step) == ("a", False, 4)
    make_run(tmp_path / "runs" / "b", "b")
    assert which_run(config(tmp_path), "b").checkpoint is None
    with pytest.raises(CheckpointError, match="holds no run"):
        which_run(config(tmp_path), "c")


def test_resume_of_another_run_than_lies_in_default_local_dir(tmp_path):
    local = tmp_path / "mine"
    make_run(local, "a", 2)
    assert which_run(config(tmp_path, default_local_dir=local), "a").run_id == "a"
    with pytest.raises(ConfigError, match=r"run b cannot be continued: .*mine .* holds run a"):
        which_run(config(tmp_path, default_local_dir=local), "b")


def test_auto_continues_what_lies_in_default_local_dir(tmp_path):
    local = tmp_path / "mine"
    assert which_run(config(tmp_path, default_local_dir=local), None).is_new
    make_run(local, "a", 2)
    found = which_run(config(tmp_path, default_local_dir=local), None)
    assert (found.run_id, found.checkpoint.global_step) == ("a", 2)


def test_disable_never_mixes_two_runs_in_one_folder(tmp_path):
    make_run(tmp_path / "mine", "a", 2)
    asked = config(tmp_path, default_local_dir=tmp_path / "mine", resume_mode="disable")
    with pytest.raises(ConfigError, match=r"holds run a, and trainer.resume_mode=disable"):
        which_run(asked, None)


def test_resume_path_continues_the_run_that_the_checkpoint_belongs_to(tmp_path):
    folder = make_run(tmp_path / "elsewhere", "a", 2, 4)
    path = folder.path / "global_step_2"
    found = which_run(config(tmp_path, resume_mode="resume_path", resume_from_path=path), None)
    assert (found.run_id, found.path, found.checkpoint.global_step) == ("a", folder.path, 2)
    other = config(
        tmp_path, resume_mode="resume_path", resume_from_path=path, default_local_dir=tmp_path / "x"
    )
    with pytest.raises(ConfigError, match="is another folder; drop one"):
        which_run(other, None)
