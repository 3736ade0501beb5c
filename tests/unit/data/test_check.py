import re
import shutil

import pyarrow.parquet as pq
import pytest

from rlcore.data.check import check_data
from rlcore.data.parquet import write_rows
from rlcore.errors import ConfigError, DataError


def rows_of(config, split="train"):
    files = config.data.train_files if split == "train" else config.data.val_files
    return pq.read_table(files[0]).to_pylist()


def test_the_report_holds_the_sums(make_config):
    report = check_data(make_config(trainer__total_epochs=3, trainer__total_training_steps=None))
    assert report.tokens_train == {"min": 33, "mean": 33.8, "max": 34}  # 10 of 64 are "line 0"-"9"
    assert (report.num_duplicates, report.notes) == (0, [])
    assert (report.num_train, report.num_val) == (64, 16)
    assert (report.steps_per_epoch, report.total_steps) == (16, 48)
    assert report.data_sources == ["rollflow/letters"]
    assert "steps in all      48" in report.lines()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"data__train_files": "nowhere.parquet"}, "nowhere.parquet: no such file"),
        ({"data__train_batch_size": 128, "actor_rollout_ref__actor__ppo_mini_batch_size": 128},
         "64 usable training prompts are fewer than one batch: data.train_batch_size=128"),
        ({"trainer__total_training_steps": 33, "trainer__total_epochs": 2},
         r"=33 is more than the data gives: 64 prompts // 4 per step = 16 steps per epoch, "
         r"x trainer.total_epochs=2 = 32 steps"),
        ({"data__max_prompt_length": 5, "data__filter_overlong_prompts": True},
         "none of 64 prompts has at most data.max_prompt_length=5"),
        ({"actor_rollout_ref__model__path": "no/model"}, "model folder no/model .*: no such"),
        ({"data__max_prompt_length": 2000, "data__max_response_length": 100},
         "2000 \\+ 100 = 2100 tokens, but the model in .* reads 2048"),
        ({"trainer__runs_root": "/proc/none"}, "folder /proc/none .trainer.runs_root. is not"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_message(make_config, overrides, message):
    with pytest.raises(DataError, match=message):
        check_data(make_config(**overrides))


def test_every_agent_name_of_the_rows_is_an_agent_loop(make_config, tmp_path):
    names = ["tool_agent", "lost", None, "lost", "gone", None, None, None]
    rows = rows_of(make_config())[:8]
    rows = [{**row, "agent_name": name} for row, name in zip(rows, names, strict=True)]
    path = tmp_path / "train.parquet"
    write_rows(path, rows)
    with pytest.raises(ConfigError) as caught:
        check_data(make_config(data__train_files=str(path), trainer__total_epochs=2))
    first, second = str(caught.value).splitlines()
    assert "train.parquet row 1: unknown agent loop 'lost'; known: " in first
    assert "train.parquet row 4: unknown agent loop 'gone'" in second


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "[1]", "must hold an object {...}, holds list"),
        ("config.json", "{", "not JSON"),
        ("generation_config.json", "nothing", "not JSON"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', "eos_token_id is '</s>', not a"),
        ("tokenizer.json", '{"model": 3}', "no readable tokenizer"),
        ("tokenizer.json", "", "no readable tokenizer"),
    ],
)
def test_a_damaged_model_folder_is_refused(make_config, tmp_path, name, content, message):
    folder = tmp_path / "model"
    shutil.copytree(make_config().actor_rollout_ref.model.path, folder)
    (folder / name).write_text(content)
    with pytest.raises(DataError, match=f"{folder}.*{re.escape(message)}"):
        check_data(make_config(actor_rollout_ref__model__path=str(folder)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "config.json is missing"),
        ("model.safetensors", "no weights"),
        ("chat_template.jinja", "the tokenizer has no chat template"),
        ("tokenizer.json", "no readable tokenizer"),
    ],
)
def test_an_incomplete_model_folder_is_refused(make_config, tmp_path, name, message):
    folder = tmp_path / "model"
    shutil.copytree(make_config().actor_rollout_ref.model.path, folder)
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"{folder}: {message}"):
        check_data(make_config(actor_rollout_ref__model__path=str(folder)))


def test_held_out_questions_in_the_training_files_are_refused_with_both_places(
    make_config, tmp_path
):
    config = make_config()
    leaked = [*rows_of(config, "val")[:2], rows_of(config)[5]]
    write_rows(tmp_path / "val.parquet", leaked)
    with pytest.raises(DataError, match=r"1 held-out questions .*train.parquet row 5 .* row 2"):
        check_data(make_config(data__val_files=str(tmp_path / "val.parquet")))


def test_repeated_held_out_questions_are_refused(make_config, tmp_path):
    rows = rows_of(make_config(), "val")
    write_rows(tmp_path / "val.parquet", [*rows, rows[0]])
    with pytest.raises(DataError, match="17 held-out prompts hold only 16 distinct questions"):
        check_data(make_config(data__val_files=str(tmp_path / "val.parquet")))


def test_what_several_checks_find_is_told_at_once(make_config, tmp_path):
    config = make_config()
    write_rows(tmp_path / "val.parquet", [*rows_of(config)[:1], *rows_of(config, "val")[:1] * 2])
    overrides = {"data__val_files": str(tmp_path / "val.parquet"), "trainer__total_epochs": 1}
    with pytest.raises(DataError) as caught:
        check_data(make_config(trainer__total_training_steps=99, **overrides))
    steps, twice = str(caught.value).splitlines()
    assert "total_training_steps=99 is more than the data gives" in steps
    assert "val.parquet row 2 asks what" in twice


def test_repeated_training_questions_are_counted_and_named(make_config, tmp_path):
    rows = rows_of(make_config())
    write_rows(tmp_path / "train.parquet", [*rows, rows[3], rows[3], rows[7]])
    report = check_data(make_config(data__train_files=str(tmp_path / "train.parquet")))
    assert (report.num_train, report.num_duplicates) == (67, 3)
    assert report.notes == [
        f"3 training prompts repeat an earlier question: first {tmp_path}/train.parquet row 64 "
        f"asks what {tmp_path}/train.parquet row 3 does"
    ]


def test_columns_that_a_field_of_ours_hides_are_named(make_config, tmp_path):
    rows = [{**row, "uid": f"u{i}"} for i, row in enumerate(rows_of(make_config()))]
    write_rows(tmp_path / "train.parquet", rows)
    report = check_data(make_config(data__train_files=str(tmp_path / "train.parquet")))
    assert report.notes[0].startswith("column uid of the files: sessions get a field of that name")


def test_prompts_that_are_too_long_are_left_out_or_cut_with_counts(make_config, tmp_path):
    rows = rows_of(make_config())
    rows[5]["prompt"][0]["content"] = "x" * 100
    write_rows(tmp_path / "train.parquet", rows)
    files = {"data__train_files": str(tmp_path / "train.parquet")}
    report = check_data(make_config(**files, data__filter_overlong_prompts=True))
    assert report.lines()[0] == "training prompts  63 (1 too long, left out; 0 cut)"
    for side in ("left", "right", "middle"):
        report = check_data(make_config(**files, data__truncation=side))
        assert report.lines()[0] == "training prompts  64 (0 too long, left out; 1 cut)"


def test_a_data_source_without_a_rule_needs_a_reward_function(make_config, tmp_path):
    rows = rows_of(make_config())
    rows[9]["data_source"] = "mine"
    write_rows(tmp_path / "train.parquet", rows)
    files = {"data__train_files": str(tmp_path / "train.parquet")}
    with pytest.raises(ConfigError, match="row 9: no reward rule for data source 'mine'"):
        check_data(make_config(**files))
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info): ...")
    report = check_data(make_config(**files, reward__custom_reward_function__path=str(reward)))
    assert report.data_sources == ["mine", "rollflow/letters"]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_module_anywhere", "cannot be imported: ModuleNotFoundError"),
        ("def other(): ...", "defines no 'compute_score'; it defines other"),
        ("compute_score = 3", "'compute_score' is not a function"),
        ("def compute_score(text): ...", "must take .data_source, solution_str"),
    ],
)
def test_a_reward_file_that_cannot_work_is_refused(make_config, tmp_path, code, message):
    path = tmp_path / "reward.py"
    path.write_text(code)
    with pytest.raises(ConfigError, match=message):
        check_data(make_config(reward__custom_reward_function__path=str(path)))
