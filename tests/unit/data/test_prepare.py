import json

import pyarrow.parquet as pq
import pytest

from rlcore.data.prepare import (
    SMOLLM2_RECIPE,
    prepare_named,
    prepare_reasoning_gym,
    prepare_smollm2,
    prepare_tiny,
    read_report,
)
from rlcore.data.prepared import write_prepared
from rlcore.data.staging import MANIFEST, is_complete, staged_folder
from rlcore.errors import ConfigError, DataError


def questions(path):
    return [row["prompt"][0]["content"] for row in pq.read_table(path).to_pylist()]


def test_chain_sum_is_distinct_and_disjoint_and_in_verls_row_format(tmp_path):
    folder = prepare_reasoning_gym("chain_sum", tmp_path / "chain_sum")
    train, test = questions(folder / "train.parquet"), questions(folder / "test.parquet")
    assert (len(train), len(test)) == (2000, 256)
    assert len({*train, *test}) == 2256
    row = pq.read_table(folder / "test.parquet").to_pylist()[3]
    entry = json.loads(row["extra_info"]["entry"])
    assert row["data_source"] == "reasoning_gym/chain_sum"
    assert row["prompt"] == [{"role": "user", "content": entry["question"]}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": entry["answer"]}
    assert row["extra_info"]["extraction"] == "last_integer"
    assert (row["extra_info"]["index"], row["extra_info"]["split"]) == (3, "test")
    assert str(eval(entry["metadata"]["expression"])) == entry["answer"]


def test_preparing_again_leaves_the_files_and_other_settings_replace_them(tmp_path):
    def prepare(seed):
        return prepare_reasoning_gym("chain_sum", tmp_path / "d", 20, 5, seed=seed)

    first = questions(prepare(0) / "train.parquet")
    stamp = (tmp_path / "d" / "train.parquet").stat().st_mtime_ns
    prepare(0)
    assert (tmp_path / "d" / "train.parquet").stat().st_mtime_ns == stamp
    assert questions(prepare(1) / "train.parquet") != first


def test_too_few_distinct_questions_are_refused_with_the_count(tmp_path):
    with pytest.raises(DataError, match="200 found in 6000 draws, 300 wanted"):
        prepare_reasoning_gym("chain_sum", tmp_path / "d", 250, 50, max_digits=1)
    assert not (tmp_path / "d").exists()


def test_unknown_task_or_setting_is_one_message(tmp_path):
    with pytest.raises(DataError, match="'no_such_task'"):
        prepare_reasoning_gym("no_such_task", tmp_path / "d")
    with pytest.raises(DataError, match="digit"):
        prepare_reasoning_gym("chain_sum", tmp_path / "d", digits=2)


def test_an_answer_that_is_no_integer_selects_the_whole_response(tmp_path):
    folder = prepare_reasoning_gym("letter_counting", tmp_path / "a", 10, 2)
    assert pq.read_table(folder / "test.parquet").to_pylist()[0]["extra_info"]["extraction"] == (
        "last_integer"
    )
    folder = prepare_reasoning_gym("caesar_cipher", tmp_path / "b", 10, 2)
    assert pq.read_table(folder / "test.parquet").to_pylist()[0]["extra_info"]["extraction"] == (
        "stripped"
    )


def test_a_task_has_a_report_and_a_histogram(tmp_path):
    folder = prepare_reasoning_gym("chain_sum", tmp_path / "a", 150, 50, max_digits=1)
    report = read_report(folder)
    assert (report.num_train, report.num_test) == (150, 50)
    # All 200 sums of two one-digit numbers (and signs) were found, with repetition.
    assert report.num_read - report.num_duplicates == 200
    assert report.num_duplicates > 0
    lengths = [len(question) for question in questions(folder / "train.parquet")]
    assert report.train_lengths["max"] == max(lengths)
    assert report.train_lengths["mean"] == round(sum(lengths) / 150, 1)
    assert report.unit == "characters"
    assert (folder / "lengths.png").read_bytes().startswith(b"\x89PNG")
    same = prepare_reasoning_gym("chain_sum", tmp_path / "b", 150, 50, max_digits=1)
    other = prepare_reasoning_gym("chain_sum", tmp_path / "c", 150, 50, max_digits=1, seed=1)
    assert read_report(same).digest == report.digest != read_report(other).digest


def test_lengths_are_in_tokens_of_a_model(tmp_path, tiny_root):
    model = str(tiny_root / "models" / "tiny")
    folder = prepare_reasoning_gym("gcd", tmp_path / "a", 20, 5, model=model)
    report = read_report(folder)
    assert report.unit == "tokens"
    # One token per character, and 21 of the template: three special ones, roles and line ends.
    longest = max(map(len, questions(folder / "train.parquet")))
    assert report.train_lengths["max"] == longest + 3 + len("user\n") + len("\nassistant\n")


def test_a_level_of_the_tasks_curriculum_is_its_difficulty(tmp_path):
    def terms(level):
        folder = prepare_reasoning_gym("chain_sum", tmp_path / f"l{level}", 60, 4, level=level)
        rows = pq.read_table(folder / "train.parquet").to_pylist()
        entries = [json.loads(row["extra_info"]["entry"]) for row in rows]
        return {entry["metadata"]["num_terms"] for entry in entries}

    assert terms(0) == {2}
    assert terms(4) == {2, 3, 4, 5, 6}
    with pytest.raises(DataError, match="'chain_sum' has the levels 0 to 10, not 99"):
        prepare_reasoning_gym("chain_sum", tmp_path / "x", 10, 2, level=99)
    with pytest.raises(DataError, match="'acre' has no levels"):
        prepare_reasoning_gym("acre", tmp_path / "x", 10, 2, level=1)


def test_a_task_without_one_right_answer_is_judged_by_its_entry(tmp_path):
    folder = prepare_reasoning_gym("graph_color", tmp_path / "a", 6, 2)
    row = pq.read_table(folder / "train.parquet").to_pylist()[0]
    assert row["reward_model"]["ground_truth"] == ""
    assert json.loads(row["extra_info"]["entry"])["answer"] is None


def test_a_task_whose_verifier_cannot_judge_stored_rows_is_refused(tmp_path):
    # Its verifier compares tuples, which JSON has not.
    with pytest.raises(
        DataError, match=r"rule of 'reasoning_gym/rearc' gives 0.0 to the row's own"
    ):
        prepare_reasoning_gym("rearc", tmp_path / "a", 3, 1)
    assert not (tmp_path / "a").exists()


def test_a_row_that_is_wrong_leaves_what_was_there(tmp_path):
    folder = prepare_reasoning_gym("chain_sum", tmp_path / "d", 20, 5)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    rows = pq.read_table(folder / "train.parquet").to_pylist()

    def write(train, test):
        write_prepared(folder, {"kind": "x"}, train=train, test=test, num_read=9, num_duplicates=0)

    wrong = {**rows[2], "reward_model": {"style": "rule", "ground_truth": "1000000"}}
    with pytest.raises(
        DataError, match=r"train row 1: the reward rule .* gives 0.0 to the row's own"
    ):
        write([rows[0], wrong], rows[4:6])
    with pytest.raises(DataError, match="test row 1 asks the same as train row 0"):
        write(rows[:3], [rows[4], rows[0]])
    with pytest.raises(DataError, match="train row 2: prompt must be a list of messages"):
        write([*rows[:2], {**rows[3], "prompt": []}], rows[4:6])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("tiny", {"size": 3}, "prepare tiny takes out=FOLDER only, not size"),
        ("questions", {}, "prepare questions needs file=FILE"),
        ("questions", {"file": "x.csv", "reply": "b"}, "prepare questions has no reply; it takes"),
        ("gcd", {"size": "many"}, "prepare gcd: size must be whole numbers"),
        ("gcd", {"test_size": -1, "seed": True}, "test_size, seed must be whole numbers"),
    ],
)
def test_settings_that_are_unknown_or_wrong_are_named(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        prepare_named(name, None, settings)


def test_an_interrupted_preparation_leaves_nothing_and_the_old_folder(tmp_path):
    folder = tmp_path / "f"
    with staged_folder(folder, {"v": 1}) as staging:
        (staging / "a").write_text("one")
    with pytest.raises(KeyboardInterrupt), staged_folder(folder, {"v": 2}) as staging:
        (staging / "a").write_text("two")
        raise KeyboardInterrupt
    assert (folder / "a").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_folder_is_complete_only_with_its_recipe_and_whole_files(tmp_path):
    folder = tmp_path / "f"
    with staged_folder(folder, {"v": 1, "sizes": (1, 2)}) as staging:
        (staging / "a").write_text("one")
    assert is_complete(folder, {"v": 1, "sizes": (1, 2)})
    assert not is_complete(folder, {"v": 2, "sizes": (1, 2)})
    (folder / "a").write_text("on")
    assert not is_complete(folder, {"v": 1, "sizes": (1, 2)})
    (folder / MANIFEST).write_text("{")
    assert not is_complete(folder, {"v": 1, "sizes": (1, 2)})


def test_a_folder_of_the_users_is_not_replaced(tmp_path):
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "precious").write_text("x")
    with (
        pytest.raises(DataError, match="was not prepared by rollflow"),
        staged_folder(tmp_path / "f", {}),
    ):
        raise AssertionError("not reached")


def test_a_converted_model_is_not_converted_again(tmp_path):
    with staged_folder(tmp_path / "model", SMOLLM2_RECIPE) as staging:
        (staging / "model.safetensors").write_text("weights")
    assert prepare_smollm2(tmp_path / "model") == tmp_path / "model"
    assert (tmp_path / "model" / "model.safetensors").read_text() == "weights"


def test_the_tiny_model_is_the_same_each_time(tmp_path):
    first, _ = prepare_tiny(tmp_path / "a")
    second, data = prepare_tiny(tmp_path / "b")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert not {*questions(data / "train.parquet")} & {*questions(data / "test.parquet")}
