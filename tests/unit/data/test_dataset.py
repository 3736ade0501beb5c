import pickle
from datetime import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcore.data.dataset import PromptDataset, PromptOrder, load_dataset, make_specs
from rlcore.data.parquet import write_rows
from rlcore.data.tokenizer import encode_chat, load_tokenizer
from rlcore.errors import DataError


def row(text, **changes):
    return {
        "data_source": "rollflow/letters",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": "aeiou"},
        "extra_info": {"index": 0},
        **changes,
    }


@pytest.fixture(scope="session")
def tokenizer(tiny_root):
    return load_tokenizer(tiny_root / "models" / "tiny")


@pytest.fixture
def read(tmp_path, make_config, tokenizer):
    """Write each list of rows to a file and read them as one data set."""

    def read(*files, max_samples=-1, sample_seed=None, **overrides):
        paths = [tmp_path / f"part-{i}.parquet" for i in range(len(files))]
        for path, rows in zip(paths, files, strict=True):
            write_rows(path, rows)
        data = make_config(**overrides).data
        return PromptDataset(
            paths, data, tokenizer, max_samples=max_samples, sample_seed=sample_seed
        )

    return read


def test_rows_of_several_files_are_numbered_through_and_keep_their_origin(read, tmp_path):
    dataset = read([row("a"), row("b")], [row("c")])
    assert len(dataset) == 3
    assert [dataset.row(i)["raw_prompt"][0]["content"] for i in range(3)] == ["a", "b", "c"]
    assert dataset.origin(1) == f"{tmp_path}/part-0.parquet row 1"
    assert dataset.origin(2) == f"{tmp_path}/part-1.parquet row 0"
    assert dataset.row(2)["reward_model"]["ground_truth"] == "aeiou"


def test_overlong_prompts_are_left_out_or_an_error_that_names_the_row(read, tokenizer):
    texts = ["x" * 3, "x" * 40, "x" * 4]
    length = len(encode_chat(tokenizer, row("x" * 4)["prompt"], {}))
    limits = {"data__max_prompt_length": length}
    dataset = read([row(t) for t in texts], data__filter_overlong_prompts=True, **limits)
    assert [len(dataset.row(i)["raw_prompt"][0]["content"]) for i in range(2)] == [3, 4]
    assert (len(dataset), dataset.num_overlong) == (2, 1)
    assert dataset.origin(1).endswith("row 2")
    with pytest.raises(DataError, match=rf"row 1: the prompt has {length + 36} tokens.*={length}"):
        read([row(t) for t in texts], **limits)
    with pytest.raises(DataError, match=r"none of 1 prompts has at most data.max_prompt_length=5"):
        read([row("x")], data__filter_overlong_prompts=True, data__max_prompt_length=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "prompt must be a list of messages"),
        ({"prompt": None}, "prompt must be a list of messages"),
        ({"prompt": [{"role": "user", "content": None}]}, "content must be a text, is NoneType"),
        ({"data_source": ""}, "data_source must be a text"),
        ({"data_source": None}, "data_source must be a text, is NoneType"),
        ({"reward_model": None}, "reward_model must be"),
        ({"reward_model": {"style": "rule", "ground_truth": None}}, "reward_model must be"),
    ],
)
def test_a_broken_row_is_named_by_file_and_row(read, tmp_path, changes, message):
    with pytest.raises(DataError, match=message) as caught:
        read([row("good"), row("bad", **changes)])
    assert str(caught.value).startswith(f"{tmp_path}/part-0.parquet row 1: ")


def test_a_column_of_the_wrong_type_is_named(read):
    with pytest.raises(DataError, match=r"row 0: prompt must be a list of messages.*is str 'text'"):
        read([row("x", prompt="text")])
    with pytest.raises(DataError, match="row 0: data_source must be a text, is int 3"):
        read([row("x", data_source=3)])
    with pytest.raises(DataError, match="row 0: extra_info must be a mapping"):
        read([row("x", extra_info="text")])


def test_a_missing_column_is_named_with_those_that_are_there(read):
    broken = row("x")
    del broken["reward_model"]
    with pytest.raises(DataError, match="column reward_model is missing; the file has data_source"):
        read([broken])


def test_a_column_that_is_no_json_is_named(read):
    read([row("x", weights=[0.5, None], nested=[{"a": {"b": True}}])])
    for value, kind in [(datetime(2026, 1, 1), "timestamp"), (b"image", "binary")]:
        with pytest.raises(DataError, match=f"column made has type .*{kind}.*rows travel as JSON"):
            read([row("x", made={"at": [value]})])


def test_files_that_cannot_be_read_are_named(tmp_path, make_config, tokenizer):
    def read(name):
        return PromptDataset([tmp_path / name], make_config().data, tokenizer)

    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("a,b\n1,2\n")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "no-rows")
    for name, message in [
        ("missing", "no such file"),
        ("empty", "the file is empty"),
        ("text", "not a readable parquet file"),
        ("no-rows", "the file has no rows"),
    ]:
        with pytest.raises(DataError, match=f"{name}: {message}"):
            read(name)


def test_max_samples_takes_the_first_or_a_seeded_choice(read):
    rows = [row(f"q{i}") for i in range(20)]

    def contents(**options):
        dataset = read(rows, max_samples=5, **options)
        return [dataset.row(i)["raw_prompt"][0]["content"] for i in range(len(dataset))]

    assert contents() == ["q0", "q1", "q2", "q3", "q4"]
    assert contents(sample_seed=1) == contents(sample_seed=1) != contents(sample_seed=2)
    assert len(set(contents(sample_seed=1))) == 5


def test_other_column_names(read):
    rows = [{**row("x"), "question": row("hello")["prompt"], "task": "mine"}]
    dataset = read(rows, data__prompt_key="question", data__reward_fn_key="task")
    assert dataset.row(0)["raw_prompt"][0]["content"] == "hello"
    assert dataset.data_source(dataset.row(0)) == "mine"


def test_a_pickled_dataset_is_small_and_reads_the_same(make_config):
    dataset = load_dataset(make_config(), "train")
    data = pickle.dumps(dataset)
    assert len(data) < 4096
    assert pickle.loads(data).row(7) == dataset.row(7)


def specs(make_config, split="train", **changes):
    dataset = load_dataset(make_config(), split)
    order = PromptOrder(num_rows=len(dataset), batch_size=4, shuffle=True, seed=0)
    values = {"start": 0, "count": 8, "run_id": "r_1", "partition_id": f"r_1/{split}",
              "global_step": 1, "num_sessions": 4, "validate": split == "val"}  # fmt: skip
    return make_specs(dataset, order, **{**values, **changes})


def test_uids_name_run_partition_epoch_and_row(make_config):
    first = specs(make_config)
    assert [spec.uid for spec in first] == [spec.uid for spec in specs(make_config)]
    # The same rows in the next epoch, another run and another partition are other prompts.
    uids = [spec.uid for spec in specs(make_config, count=128)]
    assert len(set(uids)) == 128
    others = specs(make_config, run_id="r_2", partition_id="r_2/train")
    assert not {spec.uid for spec in others} & set(uids)
    assert not any("_" in uid for uid in uids)
    # Positions, not calls, decide.
    assert [spec.uid for spec in specs(make_config, start=4, count=4)] == uids[4:8]


def test_each_validation_feeds_prompts_of_its_own(make_config):
    one = specs(make_config, "val", global_step=1)
    two = specs(make_config, "val", global_step=2)
    assert not {spec.uid for spec in one} & {spec.uid for spec in two}
    assert [spec.index for spec in one] == [spec.index for spec in two]
    assert one[0].validate


def test_a_spec_carries_the_row(make_config):
    spec = specs(make_config)[0]
    assert spec.fields["reward_model"]["ground_truth"] == "aeiou"
    assert spec.fields["data_source"] == "rollflow/letters"
    assert spec.fields["origin"].endswith(f"train.parquet row {spec.index}")
    assert spec.raw_prompt[0]["content"] == f"Vowels, line {spec.index}"
    assert "prompt" not in spec.fields
