import json

import pyarrow.parquet as pq
import pytest

from rlcore.data.prepare import SMOLLM2_RECIPE, prepare_reasoning_gym, prepare_smollm2, prepare_tiny
from rlcore.data.staging import MANIFEST, is_complete, staged_folder
from rlcore.errors import DataError


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
