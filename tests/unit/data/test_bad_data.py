"""What can be wrong with data, and the one message for each: file, row or column is named."""

import json
import shutil
from datetime import datetime

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcore.data.check import check_data
from rlcore.data.parquet import write_rows
from rlcore.errors import ConfigError, DataError


def row(text="question", **changes):
    return {
        "data_source": "rollflow/letters",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": "aeiou"},
        "extra_info": {"index": 0},
        **changes,
    }


def good_rows(count=8):
    return [row(f"question {number}") for number in range(count)]


def parquet(rows, name="train.parquet", **overrides):
    def write(folder):
        write_rows(folder / name, rows)
        return {"data.train_files": str(folder / name), **overrides}

    return write


def jsonl(*lines, name="train.jsonl"):
    def write(folder):
        content = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        (folder / name).write_bytes(b"\n".join(content) + b"\n")
        return {"data.train_files": str(folder / name)}

    return write


def raw(name, content):
    def write(folder):
        (folder / name).write_bytes(content)
        return {"data.train_files": str(folder / name)}

    return write


def with_bad_row(**changes):
    return parquet([*good_rows(5), row("the bad one", **changes)])


def message(**changes):
    return {"prompt": [{"role": "user", "content": "what?", **changes}]}


def damaged(cut):
    """Write a parquet file and change its bytes."""

    def write(folder):
        path = folder / "train.parquet"
        pq.write_table(pa.Table.from_pylist(good_rows(500)), path, compression="none")
        path.write_bytes(cut(path.read_bytes()))
        return {"data.train_files": str(path)}

    return write


def held_out(rows):
    def write(folder):
        write_rows(folder / "train.parquet", good_rows())
        write_rows(folder / "val.parquet", rows)
        return {
            "data.train_files": str(folder / "train.parquet"),
            "data.val_files": str(folder / "val.parquet"),
        }

    return write


def saved_dataset(state, **files):
    def write(folder):
        (folder / "saved").mkdir()
        if state is not None:
            (folder / "saved" / "state.json").write_text(json.dumps(state))
        for name, content in files.items():
            (folder / "saved" / name.replace("_json", ".json")).write_bytes(content)
        return {"data.train_files": str(folder / "saved")}

    return write


def template(text):
    """Use the tiny model with another chat template."""

    def write(folder):
        write_rows(folder / "train.parquet", good_rows())
        return {"data.train_files": str(folder / "train.parquet"), "TEMPLATE": text}

    return write


def not_utf8(folder):
    """Write a column that says it is text and is not."""
    rows = good_rows(5)
    sources = pa.array([b"x"] * 5 + [b"\xff\xfe"], pa.binary()).cast(pa.string(), safe=False)
    table = pa.Table.from_pylist([*rows, row("bad")])
    place = table.column_names.index("data_source")
    table = table.set_column(place, "data_source", sources)
    pq.write_table(table, folder / "train.parquet")
    return {"data.train_files": str(folder / "train.parquet")}


def both_missing(folder):
    return {"data.train_files": ["none-1.parquet", "none-2.parquet"], "data.val_files": "none-3"}


NO_COLUMN = {name: value for name, value in row().items() if name != "reward_model"}
REFUSES = (
    "{% if 'question 3' in messages[0].content %}{{ raise_exception('not this one') }}{% endif %}x"
)
F = "train.parquet row 5: "

BAD_DATA = [
    # files
    ("missing", lambda f: {"data.train_files": "no.parquet"}, "no.parquet: no such file"),
    ("all missing files at once", both_missing,
     r"none-1.parquet: no such file\nnone-2.parquet: no such file\nnone-3: no such file"),
    ("empty", raw("train.parquet", b""), "train.parquet: the file is empty"),
    ("text named parquet", raw("train.parquet", b"a,b\n1,2\n"), "not a readable parquet file"),
    ("another kind", raw("train.csv", b"question,answer\n1,2\n"),
     "train.csv: not a readable parquet file, and no .jsonl; `rollflow prepare questions"),
    ("truncated", damaged(lambda data: data[: len(data) // 2]),
     "train.parquet: a truncated parquet file: [0-9]+ bytes without the footer"),
    ("damaged page", damaged(lambda data: data[:4] + b"\xff" * 4000 + data[4004:]),
     "train.parquet: damaged after row"),
    ("no rows", parquet([], "train.parquet"), "train.parquet: the file has no rows"),
    ("array", raw("t.json", b'[{"prompt": 1}]'), "t.json: one JSON array; write JSON lines"),
    ("broken line", jsonl(row("a"), b'{"prompt": [', name="t.jsonl"), "t.jsonl row 1: not JSON"),
    ("line is no object", jsonl(row("a"), b"[1]"), "row 1: a line must be an object"),
    ("not UTF-8", jsonl(row("a"), b'{"prompt": "\xff"}'), "row 1: not UTF-8 text"),
    ("a folder", saved_dataset(None), "saved: a folder without state.json"),
    ("several splits", saved_dataset({}, dataset_dict_json=b'{"splits": ["train", "test"]}'),
     "a data set with the splits train, test; name one"),
    ("Arrow file missing", saved_dataset({"_data_files": [{"filename": "data.arrow"}]}),
     "data.arrow: no such file"),
    ("Arrow file damaged",
     saved_dataset({"_data_files": [{"filename": "data"}]}, data=b"no arrow at all"),
     "data: not a readable Arrow file"),
    # columns
    ("no column", parquet([NO_COLUMN]),
     "column reward_model is missing; the file has data_source, prompt, extra_info"),
    ("no column in a line", jsonl(row("a"), NO_COLUMN), "row 1: column reward_model is missing"),
    ("times", parquet([row("x", made=datetime(2026, 1, 1))]), "column made has type timestamp"),
    ("bytes", parquet([row("x", image={"bytes": b"png"})]), "column image has type struct<bytes"),
    # rows
    ("prompt is text", parquet([row("x", prompt="text")]),
     "row 0: prompt must be a list of messages {role, content}, is str 'text'"),
    ("no messages", with_bad_row(prompt=[]), F + "prompt must be a list of messages"),
    ("null prompt", with_bad_row(prompt=None), F + "prompt must be a list of messages"),
    ("message is text", parquet([row("x", prompt=["hello"])]),
     "row 0: prompt: a message must be {role, content}, is str 'hello'"),
    ("no role", with_bad_row(**message(role=None)), F + "prompt: a message's role must be a text"),
    ("unknown role", with_bad_row(**message(role="robot")),
     F + "prompt: role 'robot' is unknown; known: system, developer, user, assistant, tool"),
    ("null content", with_bad_row(**message(content=None)),
     F + "prompt: a message's content must be a text, is NoneType"),
    ("empty content", with_bad_row(**message(content="")), F + "prompt: a message's content"),
    ("content in parts", jsonl(row("x", prompt=[{"role": "user", "content": [{"type": "image"}]}])),
     "row 0: prompt: a message's content must be a text, is list"),
    ("null ground truth", with_bad_row(reward_model={"style": "rule", "ground_truth": None}),
     F + "reward_model must be {style, ground_truth}"),
    ("no reward model", with_bad_row(reward_model=None), F + "reward_model must be"),
    ("NaN ground truth", jsonl(row("x", reward_model={"ground_truth": float("nan")})),
     "row 0: reward_model.ground_truth is a number that is not finite"),
    ("NaN", parquet([*({**r, "level": 1.0} for r in good_rows(5)), row("x", level=float("nan"))]),
     F + "level is a number that is not finite"),
    ("infinite", jsonl(row("x", extra_info={"bounds": [1.0, float("inf")]})),
     r"row 0: extra_info.bounds\[1\] is a number that is not finite"),
    ("no data source", with_bad_row(data_source=None), F + "data_source must be a text"),
    ("data source is a number", parquet([row("x", data_source=3)]), "data_source must be a text"),
    ("extra_info is text", parquet([row("x", extra_info="t")]), "extra_info must be a mapping"),
    ("agent name is a number", parquet([row("x", agent_name=3)]), "agent_name must be a text"),
    ("lone surrogate", jsonl(row("a\ud800b")), "row 0: the prompt holds a lone surrogate"),
    ("lone surrogate elsewhere", jsonl(row("a", extra_info={"note": "\ud800"})),
     "row 0: extra_info.note is text with a lone surrogate"),
    ("several rows at once", parquet([row("x", data_source=""), row("y"), row("z", prompt=[])]),
     r"2 rows are wrong:\n  .*train.parquet row 0: data_source .*\n  .*parquet row 2: prompt"),
    ("all rows", parquet([row(str(i), prompt=[]) for i in range(50)]),
     r"20 rows are wrong \(reading stopped there\)"),
    ("no rule", parquet([*good_rows(), row("x", data_source="mine")]),
     "train.parquet row 8: no reward rule for data source 'mine'"),
    # prompts
    ("too long", parquet([*good_rows(), row("x" * 900), row("y" * 950)]),
     r"train.parquet row 8: the prompt has 9\d\d tokens, more than data.max_prompt_length=64 "
     r"\(2 of 10 prompts are too long, the longest has 9\d\d tokens\)"),
    ("all too long",
     parquet([row("x" * 900)], **{"data.filter_overlong_prompts": True}),
     "none of 1 prompts has at most data.max_prompt_length=64"),
    ("template refuses a row", template(REFUSES),
     "train.parquet row 3: the chat template refuses the prompt: not this one"),
    ("template is broken", template("{{ messages[0].content.no.such }}"),
     "train.parquet row 0: the chat template refuses the prompt"),
    ("template gives nothing", template("{# none #}"), "row 0: the chat template gives an empty"),
    ("no template", template(None), "the tokenizer has no chat template"),
    # sets
    ("held out twice", held_out([row("a"), row("b"), row("a")]),
     "3 held-out prompts hold only 2 distinct questions: .*val.parquet row 2 asks what "
     ".*val.parquet row 0 does"),
    ("trained and held out", held_out([row("new"), row("question 7")]),
     "1 held-out questions are in the training files too.*train.parquet row 7 and .*val.parquet "
     "row 1"),
    ("a text that is no UTF-8", not_utf8, "train.parquet: a text in rows 0 to 5 is no UTF-8"),
    ("a template that divides by zero", template("{{ 1 / 0 }}"), "the chat template refuses the"),
    ("fewer than a batch", parquet(good_rows(3)),
     "3 usable training prompts are fewer than one batch: data.train_batch_size=4"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("write", "expected"), [b[1:] for b in BAD_DATA], ids=[b[0] for b in BAD_DATA]
)
def test_bad_data_is_one_message(make_config, tmp_path, write, expected):
    overrides = write(tmp_path)
    if "TEMPLATE" in overrides:
        text = overrides.pop("TEMPLATE")
        folder = tmp_path / "model"
        shutil.copytree(make_config().actor_rollout_ref.model.path, folder)
        (folder / "chat_template.jinja").unlink()
        if text is not None:
            (folder / "chat_template.jinja").write_text(text)
        overrides["actor_rollout_ref.model.path"] = str(folder)
    config = make_config(**{key.replace(".", "__"): value for key, value in overrides.items()})
    with pytest.raises((DataError, ConfigError), match=expected) as caught:
        check_data(config)
    # Nothing half-written stays behind, and the message is no traceback.
    assert not list((tmp_path / "cache").glob(".*"))
    assert len(str(caught.value)) < 6000


def test_there_are_enough_of_them():
    assert len(BAD_DATA) >= 25
