import json
import pickle

import pytest

from rlcore.data.dataset import PromptOrder, index_of_uid, load_dataset, make_specs
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
    """Write each list of rows to a file and read them as the training set."""

    def read(*files, **overrides):
        paths = [tmp_path / f"part-{i}.parquet" for i in range(len(files))]
        for path, rows in zip(paths, files, strict=True):
            write_rows(path, rows)
        config = make_config(data__train_files=list(map(str, paths)), **overrides)
        return load_dataset(config, "train", tokenizer)

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
    dataset = read([row(t) for t in texts], data__truncation="left", **limits)
    # Kept whole here: the agent loop cuts the token ids.
    assert (len(dataset), dataset.store.meta.num_truncated) == (3, 1)
    assert dataset.row(1)["raw_prompt"][0]["content"] == "x" * 40


def test_json_lines_are_the_same_rows(read, tmp_path, make_config, tokenizer):
    rows = [row("a", extra_info={"x": 1.5}), row("b", extra_info={"y": [None, True]})]
    text = "\n".join(json.dumps(r) for r in rows)
    (tmp_path / "t.jsonl").write_text(f"\ufeff{text}\n\n")  # a BOM and a blank line do no harm
    config = make_config(data__train_files=str(tmp_path / "t.jsonl"))
    dataset = load_dataset(config, "train", tokenizer)
    assert [dataset.row(i)["extra_info"] for i in range(2)] == [{"x": 1.5}, {"y": [None, True]}]
    assert dataset.row(1)["raw_prompt"] == [{"role": "user", "content": "b"}]
    assert dataset.origin(1) == f"{tmp_path}/t.jsonl row 1"


def test_messages_lose_the_empty_keys_of_their_column(read):
    messages = [
        {"role": "system", "content": "Be brief.", "tool_calls": None, "name": None},
        {"role": "user", "content": "hi \N{GRINNING FACE}", "tool_calls": None, "name": "Ann"},
    ]
    dataset = read([row("x", prompt=messages)], data__max_prompt_length=200)
    assert dataset.row(0)["raw_prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi \N{GRINNING FACE}", "name": "Ann"},
    ]


def test_rows_are_read_once_and_again_when_something_changes(read, tmp_path):
    first = read([row("a"), row("b")])
    stores = lambda: sorted(p.name for p in (tmp_path / "cache").iterdir())  # noqa: E731
    assert len(stores()) == 1
    stamp = (first.store.path / "rows.jsonl").stat().st_mtime_ns
    config = {"data__max_prompt_length": 60}
    assert read([row("a"), row("b")], **config).store.path != first.store.path  # a new file
    assert len(stores()) == 2
    assert (first.store.path / "rows.jsonl").stat().st_mtime_ns == stamp


def test_the_same_files_and_settings_find_the_rows_that_are_there(make_config):
    first = load_dataset(make_config(), "train")
    stamp = (first.store.path / "rows.jsonl").stat().st_mtime_ns
    second = load_dataset(make_config(actor_rollout_ref__rollout__n=8), "train")
    assert second.store.path == first.store.path
    assert (first.store.path / "rows.jsonl").stat().st_mtime_ns == stamp
    assert load_dataset(make_config(data__max_prompt_length=63), "train").store.path != (
        first.store.path
    )


def test_a_folder_for_rows_that_cannot_be_made_is_named(make_config):
    with pytest.raises(DataError, match=r"/proc/none .data.cache_dir. is not writable"):
        load_dataset(make_config(data__cache_dir="/proc/none"), "train")


def test_numbers_keep_their_type_and_value(read):
    info = {"big": 2**62 + 1, "tenth": 0.1, "flag": True, "none": None, "nested": [{"a": [1]}]}
    assert read([row("x", extra_info=info)]).row(0)["extra_info"] == info


def test_max_samples_takes_the_first_or_a_seeded_choice(read):
    rows = [row(f"q{i}") for i in range(20)]

    def contents(**options):
        dataset = read(rows, data__train_max_samples=5, trainer__total_epochs=4, **options)
        return [dataset.row(i)["raw_prompt"][0]["content"] for i in range(len(dataset))]

    assert contents(data__shuffle=False) == ["q0", "q1", "q2", "q3", "q4"]
    assert contents(seed=1) == contents(seed=1) != contents(seed=2)
    assert len(set(contents(seed=1))) == 5


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
    assert [index_of_uid(spec.uid) for spec in first] == [spec.index for spec in first]
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
