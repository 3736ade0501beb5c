"""Bad input to the real command: one clear message, exit code 2, nothing started."""

import json

import pytest

from rlcore.trainer.run_folder import HeldLock, RunFolder

pytestmark = [pytest.mark.integration, pytest.mark.slow]

RAISES = """
def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return 1 / 0
"""


def runs_of(project, root):
    folder = project.root / root
    return [p for p in folder.iterdir() if p.name != ".prefect"] if folder.is_dir() else []


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train_files=data/none.parquet", "data/none.parquet"),
        ("actor_rollout_ref.model.path=models/none", "models/none"),
        ("reward.custom_reward_function.path=none.py", "none.py"),
        ("data.train_batch_size=6", "6"),
    ],
)
def test_what_is_missing_or_does_not_divide_is_named(project, override, message):
    code, text = project.run("train", "grpo-tiny", override, "trainer.runs_root=bad")
    assert code == 2
    assert "error: " in text
    assert message in text
    assert "Traceback" not in text
    assert runs_of(project, "bad") == []


def test_bad_data_is_named_by_file_and_row(project):
    good = (project.root / "data/tiny/train.parquet").read_bytes()
    (project.root / "cut.parquet").write_bytes(good[: len(good) // 2])
    rows = [{"prompt": [{"role": "robot", "content": "x"}], "data_source": "rollflow/letters",
             "reward_model": {"ground_truth": "a"}}] * 2  # fmt: skip
    rows.append({**rows[0], "reward_model": {"ground_truth": float("nan")}})
    (project.root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, text = project.run(
        "train", "grpo-tiny", "data.train_files=[data/tiny/train.parquet,cut.parquet]",
        "data.val_files=rows.jsonl", "trainer.runs_root=bad",
        f"data.cache_dir={project.root}/cache",
    )  # fmt: skip
    assert code == 2
    assert "cut.parquet: a truncated parquet file" in text
    for row in (0, 1, 2):
        assert f"rows.jsonl row {row}: prompt: role 'robot' is unknown" in text
    assert "Traceback" not in text
    assert runs_of(project, "bad") == []


def test_the_module_is_the_same_command(project):
    code, text = project.run("grpo-tiny", "data.train_files=none.parquet", module="flows.train")
    assert code == 2
    assert "none.parquet" in text
    assert "Traceback" not in text


def test_devices_that_another_run_holds_are_refused_with_its_name(project, served):
    import os

    folder = project.root / "tmp" / f"rollflow-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    with HeldLock(folder / "devices.lock", holder="run nightly-7", what="the devices"):
        code, text = project.run("train", "grpo-tiny", "trainer.runs_root=held", **served)
    assert code == 2
    assert "held by run nightly-7" in text
    assert "Traceback" not in text
    assert runs_of(project, "held") == []


def test_a_folder_that_another_run_holds_is_refused_with_its_name(project, served):
    path = project.root / "held-folder"
    folder = RunFolder.create(path, run_id="nightly-8", request={"preset": "grpo-tiny"})
    before = folder.record()
    with HeldLock(path / "run.lock", holder="run nightly-8", what=str(path)):
        code, text = project.run(
            "train", "grpo-tiny", f"trainer.default_local_dir={path}", **served
        )
    assert code == 2
    assert f"{path} is held by run nightly-8 (pid " in text
    assert "Traceback" not in text
    assert folder.record() == before


def test_a_ray_cluster_with_too_few_cpus_is_refused_with_both_numbers(
    project, served, ray_head, tmp_path
):
    address = ray_head(tmp_path, project.environment(), num_cpus=1)
    code, text = project.run(
        "train", "grpo-tiny", f"ray.address={address}", "trainer.runs_root=small",
        HOME=str(tmp_path), **served,
    )  # fmt: skip
    assert code == 2
    assert f"the Ray cluster at {address} has 1 CPUs, the run needs 2" in text
    assert "Traceback" not in text
    assert runs_of(project, "small") == []


def test_a_reward_function_that_raises_ends_the_run_with_row_and_traceback(joined):
    (joined.root / "raises.py").write_text(RAISES)
    code, text = joined.run(
        "train",
        "grpo-tiny",
        "reward.custom_reward_function.path=raises.py",
        "trainer.val_before_train=false",
        "trainer.runs_root=raising",
    )
    assert code == 1, text[-3000:]
    said = text[text.index("error: ") :]
    assert "ZeroDivisionError" in said
    assert "train.parquet row" in said
    (run,) = runs_of(joined, "raising")
    (attempt,) = json.loads((run / "run.json").read_text())["attempts"]
    assert attempt["outcome"] == "failed"
    assert not list(run.glob("global_step_*"))
