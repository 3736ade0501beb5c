"""Data sets from a CSV or JSON lines file of questions and answers."""

import csv
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rlcore.data.jsonl import JsonLinesSource
from rlcore.data.prepared import MAX_PROBLEMS, write_prepared
from rlcore.data.staging import is_complete
from rlcore.errors import DataError
from rlcore.reward.extraction import ANSWER_EXTRACTORS, extract_last_integer

DELIMITERS = {".csv": ",", ".tsv": "\t"}


def prepare_questions(  # noqa: PLR0913  the options of a command
    file: str | Path,
    out_dir: str | Path,
    *,
    question: str = "question",
    answer: str = "answer",
    data_source: str = "exact_match",
    extraction: str | None = None,
    system: str | None = None,
    test_size: int = 256,
    seed: int = 0,
    model: str | None = None,
) -> Path:
    """Write train.parquet and test.parquet from a file of questions and answers.

    A question that is there again with the same answer is left out and counted. The held-out
    questions are chosen at random, in the file's order.

    Args:
        file: .csv or .tsv with a header, or .jsonl.
        out_dir: Folder for the result.
        question: Column of the questions.
        answer: Column of the answers.
        data_source: Chooses the reward rule: `exact_match`, `openai/gsm8k`, `lighteval/MATH`, or a
            name of your own for a reward function of your own.
        extraction: How `exact_match` finds the answer in a response; None: `last_integer` if all
            answers are integers, else `stripped`, the whole response.
        system: System message before every question.
        test_size: Questions to hold out.
        seed: Chooses which.
        model: Model folder whose tokens measure the questions; None: characters.

    Raises:
        DataError: the file or a row of it is wrong, a question has two answers, or there are too
            few questions; nothing is written then.
    """
    path, folder = Path(file), Path(out_dir)
    if extraction is not None and extraction not in ANSWER_EXTRACTORS:
        raise DataError(
            f"extraction={extraction} is unknown; known: {', '.join(ANSWER_EXTRACTORS.names())}"
        )
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    recipe = {
        "kind": f"questions/{path.name}", "format": "1",
        "file": hashlib.sha256(path.read_bytes()).hexdigest(),
        "columns": [question, answer], "data_source": data_source, "extraction": extraction,
        "system": system, "test_size": test_size, "seed": seed, "model": model,
    }  # fmt: skip
    if is_complete(folder, recipe):
        return folder
    pairs, num_read = _distinct_pairs(path, question, answer)
    if not 0 <= test_size < len(pairs):
        raise DataError(
            f"{path}: {len(pairs)} distinct questions, of which test_size={test_size} cannot be "
            "held out while some are left to train on"
        )
    if extraction is None:
        is_integer = all(extract_last_integer(truth) == truth for _, truth in pairs)
        extraction = "last_integer" if is_integer else "stripped"
    chosen = np.random.default_rng(seed).choice(len(pairs), size=test_size, replace=False)
    held_out = set(map(int, chosen))
    rows: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for number, (asked, truth) in enumerate(pairs):
        split = "test" if number in held_out else "train"
        info = {"index": len(rows[split]), "split": split, "extraction": extraction}
        messages = [{"role": "system", "content": system}] if system else []
        rows[split].append(
            {
                "data_source": data_source,
                "prompt": [*messages, {"role": "user", "content": asked}],
                "reward_model": {"style": "rule", "ground_truth": truth},
                "extra_info": {**info, "question": asked},
            }
        )
    write_prepared(
        folder,
        recipe,
        train=rows["train"],
        test=rows["test"],
        num_read=num_read,
        num_duplicates=num_read - len(pairs),
        model=model,
        notes=[f"answers are found by extraction={extraction}"],
    )
    return folder


def _distinct_pairs(path: Path, question: str, answer: str) -> tuple[list[tuple[str, str]], int]:
    """Return distinct questions with their answers, and how many were read."""
    seen: dict[str, tuple[str, str]] = {}
    pairs: list[tuple[str, str]] = []
    problems: list[str] = []
    num_read = 0
    for origin, row in _read(path):
        num_read += 1
        try:
            asked, truth = (_text(row, name, origin) for name in (question, answer))
            key = " ".join(asked.split())
            if key not in seen:
                seen[key] = (truth, origin)
                pairs.append((asked, truth))
            _check_same(truth, origin, *seen[key])
        except DataError as error:
            problems.append(str(error))
        if len(problems) == MAX_PROBLEMS:
            break
    if problems:
        raise DataError("\n".join(problems))
    if not pairs:
        raise DataError(f"{path}: the file has no rows")
    return pairs, num_read


def _check_same(truth: str, origin: str, first_truth: str, first_origin: str) -> None:
    if truth != first_truth:
        raise DataError(
            f"{origin}: the question of {first_origin} with another answer: {truth!r}, there "
            f"{first_truth!r}"
        )


def _text(row: dict[str, Any], name: str, origin: str) -> str:
    if name not in row:
        known = ", ".join(str(key) for key in row if key is not None)
        raise DataError(
            f"{origin}: no column {name!r}; there are {known} (question=NAME and answer=NAME name "
            "the two)"
        )
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{origin}: {name} must be a text, is {type(value).__name__} {value!r}")
    text = str(value).strip()
    if not text or text.lower() == "nan":
        raise DataError(f"{origin}: {name} is empty")
    return text


def _read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if path.suffix in {".jsonl", ".ndjson", ".json"}:
        for number, row in JsonLinesSource(path).rows():
            yield f"{path} row {number}", row
        return
    if path.suffix not in DELIMITERS:
        raise DataError(f"{path}: unknown kind of file; .csv, .tsv and .jsonl are read")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter=DELIMITERS[path.suffix], strict=True)
            for row in reader:
                origin = f"{path} line {reader.line_num}"
                if None in row or None in row.values():
                    raise DataError(
                        f"{origin}: not as many fields as the header names; put quotes round a "
                        "field that holds the delimiter"
                    )
                yield origin, row
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error})") from error
    except csv.Error as error:
        raise DataError(f"{path}: not a readable CSV file ({error})") from error
