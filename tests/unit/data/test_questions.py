"""From a file of questions and answers to training and held-out rows, or one message."""

import csv
import json

import pyarrow.parquet as pq
import pytest

from rlcore.data.prepare import prepare_named, read_report
from rlcore.data.questions import prepare_questions
from rlcore.errors import DataError

PAIRS = [(f"What is {i}, plus {i}?", str(2 * i)) for i in range(30)]


def write_csv(path, pairs, names=("question", "answer")):
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([names, *pairs])
    return path


def rows_of(folder, split):
    return pq.read_table(folder / f"{split}.parquet").to_pylist()


def test_csv_becomes_rows_of_exact_match(tmp_path):
    path = write_csv(tmp_path / "sums.csv", [*PAIRS, PAIRS[3], ("What  is 4,\nplus 4?", "8")])
    folder = prepare_questions(path, tmp_path / "out", test_size=10, system="Be brief.")
    train, test = rows_of(folder, "train"), rows_of(folder, "test")
    assert (len(train), len(test)) == (20, 10)
    asked = [row["extra_info"]["question"] for row in (*train, *test)]
    assert sorted(asked) == sorted(question for question, _ in PAIRS)
    row = train[0]
    assert row["data_source"] == "exact_match"
    assert row["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": row["extra_info"]["question"]},
    ]
    assert row["reward_model"]["ground_truth"] == dict(PAIRS)[row["extra_info"]["question"]]
    assert row["extra_info"]["extraction"] == "last_integer"
    report = read_report(folder)
    # One row again, and one that differs in white space only.
    assert (report.num_read, report.num_duplicates) == (32, 2)
    assert report.lines()[0] == "questions         32 read, 2 repeated and left out"


def test_json_lines_other_columns_and_another_seed(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(json.dumps({"q": a, "a": int(b), "id": 1}) for a, b in PAIRS))
    made = prepare_named(
        "questions", str(tmp_path / "a"),
        {"file": str(path), "question": "q", "answer": "a", "test_size": 5},
    )  # fmt: skip
    assert made == [tmp_path / "a"]
    held_out = {row["extra_info"]["question"] for row in rows_of(tmp_path / "a", "test")}
    again = prepare_questions(path, tmp_path / "b", question="q", answer="a", test_size=5, seed=1)
    assert held_out != {row["extra_info"]["question"] for row in rows_of(again, "test")}
    stamp = (again / "train.parquet").stat().st_mtime_ns
    prepare_questions(path, tmp_path / "b", question="q", answer="a", test_size=5, seed=1)
    assert (again / "train.parquet").stat().st_mtime_ns == stamp


def test_answers_that_are_words_are_the_whole_response(tmp_path):
    path = write_csv(tmp_path / "c.csv", [("Capital of France?", "Paris"), ("Of Peru?", "Lima")])
    folder = prepare_questions(path, tmp_path / "out", test_size=1)
    assert rows_of(folder, "test")[0]["extra_info"]["extraction"] == "stripped"


def test_a_data_source_without_a_rule_is_noted(tmp_path):
    path = write_csv(tmp_path / "c.csv", PAIRS)
    folder = prepare_questions(path, tmp_path / "out", test_size=3, data_source="mine")
    assert any("'mine' has no built-in reward rule" in note for note in read_report(folder).notes)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"question,answer\n", "c.csv: the file has no rows"),
        (b"prompt,answer\na,b\n", "c.csv line 2: no column 'question'; there are prompt, answer"),
        (b"question,answer\na,b\nc,\n", "c.csv line 3: answer is empty"),
        (b"question,answer\na,NaN\nb,1\n", "c.csv line 2: answer is empty"),
        (b"question,answer\na,b,c\n", "c.csv line 2: not as many fields as the header names"),
        (b"question,answer\na\n", "c.csv line 2: not as many fields"),
        (b'question,answer\n"a,b\n', "c.csv: not a readable CSV file"),
        (b"question,answer\n\xff,b\n", "c.csv: not UTF-8 text"),
        (b"question,answer\na,1\nb,2\na,3\n",
         "c.csv line 4: the question of .*c.csv line 2 with another answer: '3', there '1'"),
        (b"question,answer\na,1\nb,2\n", "2 distinct questions, of which test_size=256"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_one_message_and_nothing_is_written(tmp_path, content, message):
    (tmp_path / "c.csv").write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare_questions(tmp_path / "c.csv", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["c.csv"]


def test_unknown_files_and_extractions_are_named(tmp_path):
    with pytest.raises(DataError, match=r"x.csv: no such file"):
        prepare_questions(tmp_path / "x.csv", tmp_path / "out")
    (tmp_path / "x.xlsx").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"x.xlsx: unknown kind of file; .csv, .tsv and .jsonl"):
        prepare_questions(tmp_path / "x.xlsx", tmp_path / "out")
    with pytest.raises(
        DataError, match="extraction=regex is unknown; known: last_integer, stripped"
    ):
        prepare_questions(tmp_path / "x.xlsx", tmp_path / "out", extraction="regex")
