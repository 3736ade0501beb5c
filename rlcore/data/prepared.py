"""What every prepared data set is: two parquet files, a report, a histogram; whole or absent.

train.parquet, test.parquet    rows in verl's format, disjoint by question
report.json                    counts, lengths, duplicates, digest of the rows
lengths.png                    histogram of the questions' lengths
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rlcore.data.parquet import write_rows
from rlcore.data.rows import check_row, encode_row, question_of
from rlcore.data.staging import staged_folder
from rlcore.data.tokenizer import count_tokens, load_tokenizer, render_chat
from rlcore.errors import ConfigError, DataError
from rlcore.reward.rules import find_rule

logger = logging.getLogger(__name__)

REPORT, HISTOGRAM = "report.json", "lengths.png"
MAX_PROBLEMS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedReport:
    """What a prepared folder holds."""

    kind: str
    num_read: int
    """Questions drawn or read."""
    num_duplicates: int
    """Of these, left out because the question was there already."""
    num_train: int
    num_test: int
    unit: str
    """Of the lengths: `characters`, or `tokens` where a model was named."""
    train_lengths: dict[str, float]
    """`min`, `median`, `mean`, `max` of the prompts."""
    test_lengths: dict[str, float]
    digest: str
    """Of all rows, in order: equal digests are equal data."""
    notes: list[str]

    def lines(self) -> list[str]:
        """Return the report as lines for a person."""
        shown = [
            ("training", self.num_train, self.train_lengths),
            ("held out", self.num_test, self.test_lengths),
        ]
        return [
            f"questions         {self.num_read} read, {self.num_duplicates} repeated and left out",
            *(
                f"{name:18}{count} questions, {lengths['min']:.0f} to {lengths['max']:.0f} "
                f"{self.unit} (median {lengths['median']:.0f})"
                for name, count, lengths in shown
            ),
            f"digest            {self.digest}",
            *(f"note              {note}" for note in self.notes),
        ]


def read_report(folder: Path) -> PreparedReport | None:
    """Return the report of a prepared data set; None where there is none (a model folder)."""
    path = folder / REPORT
    if not path.is_file():
        return None
    return PreparedReport(**json.loads(path.read_text(encoding="utf-8")))


def write_prepared(
    folder: Path,
    recipe: Mapping[str, Any],
    *,
    train: Sequence[dict[str, Any]],
    test: Sequence[dict[str, Any]],
    num_read: int,
    num_duplicates: int,
    model: str | None = None,
    notes: Sequence[str] = (),
) -> PreparedReport:
    """Check every row and write the folder; a failure leaves what was there before.

    Args:
        folder: Where to.
        recipe: What the data set is made of; a folder of the same recipe is not made again.
        train: Rows to train on.
        test: Held-out rows.
        num_read: Questions that were drawn or read.
        num_duplicates: Of these, left out.
        model: Model folder whose tokens are the unit of the lengths; None: characters.
        notes: For the report.

    Raises:
        DataError: a row is wrong, its own answer is not accepted by the rule of its data source, a
            question is in both files, or `folder` holds other files.
    """
    notes = [*notes, *check_rows(train, "train"), *check_rows(test, "test")]
    check_disjoint(train, test)
    measure = _Measure(model)
    lengths = {"train": measure.lengths(train), "test": measure.lengths(test)}
    report = PreparedReport(
        kind=str(recipe["kind"]),
        num_read=num_read,
        num_duplicates=num_duplicates,
        num_train=len(train),
        num_test=len(test),
        unit=measure.unit,
        train_lengths=_summary(lengths["train"]),
        test_lengths=_summary(lengths["test"]),
        digest=digest_of(train, test),
        notes=list(dict.fromkeys(notes)),
    )
    with staged_folder(folder, recipe) as staging:
        write_rows(staging / "train.parquet", train)
        write_rows(staging / "test.parquet", test)
        draw_lengths(lengths, measure.unit, staging / HISTOGRAM)
        text = json.dumps(asdict(report), indent=2, ensure_ascii=False)
        (staging / REPORT).write_text(text + "\n", encoding="utf-8")
    logger.info("wrote %s: %d training and %d held-out questions", folder, len(train), len(test))
    return report


def check_rows(rows: Sequence[Mapping[str, Any]], split: str) -> list[str]:
    """Check that each row can be fed, and that its rule accepts its own answer.

    Returns:
        Notes, one per data source without a built-in rule.

    Raises:
        DataError: names the rows, 20 at most.
    """
    problems: list[str] = []
    unruled: set[str] = set()
    for number, row in enumerate(rows):
        origin = f"{split} row {number}"
        try:
            check_row(row, origin, prompt_key="prompt", data_source_key="data_source")
            encode_row(row, origin)
            _check_answer(row, origin)
        except DataError as error:
            problems.append(str(error))
        except ConfigError:
            unruled.add(row["data_source"])
        if len(problems) == MAX_PROBLEMS:
            break
    if problems:
        raise DataError("\n".join(problems))
    return [
        f"data source {source!r} has no built-in reward rule: training on it needs "
        "reward.custom_reward_function.path"
        for source in sorted(unruled)
    ]


def _check_answer(row: Mapping[str, Any], origin: str) -> None:
    """Check that the row's rule accepts the true answer, in one of the forms that rules expect."""
    truth, source = str(row["reward_model"]["ground_truth"]), row["data_source"]
    rule = find_rule(source)
    if not truth:  # the task's verifier judges without one
        return
    scores: list[object] = []
    for text in (truth, f"\\boxed{{{truth}}}", f"#### {truth}"):
        score = rule(source, text, row["reward_model"]["ground_truth"], row.get("extra_info") or {})
        scores.append(score["score"])
        if score.get("acc", score["score"]) == 1.0:
            return
    raise DataError(
        f"{origin}: the reward rule of {source!r} gives {scores[0]} to the row's own answer "
        f"{truth[:60]!r}, so nothing could be learnt from it"
    )


def check_disjoint(train: Sequence[Mapping[str, Any]], test: Sequence[Mapping[str, Any]]) -> None:
    """Check that no question is there twice, in one file or over both.

    Raises:
        DataError: names the rows.
    """
    seen: dict[str, str] = {}
    for split, rows in (("train", train), ("test", test)):
        for number, row in enumerate(rows):
            question = " ".join(question_of(row["prompt"]).split())
            if question in seen:
                raise DataError(f"{split} row {number} asks the same as {seen[question]}")
            seen[question] = f"{split} row {number}"


def digest_of(*parts: Sequence[Mapping[str, Any]]) -> str:
    """Return a digest of rows that does not depend on how a file format packs them."""
    digest = hashlib.sha256()
    for rows in parts:
        for row in rows:
            digest.update(encode_row(row, "row"))
        digest.update(b"\0")
    return digest.hexdigest()


def draw_lengths(lengths: Mapping[str, Sequence[int]], unit: str, path: Path) -> None:
    """Write a histogram of the prompts' lengths as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=110)
    for name, values in lengths.items():
        axes.hist(values, bins=40, alpha=0.6, label=f"{name} ({len(values)})", density=True)
    axes.set(xlabel=f"prompt length ({unit})", ylabel="share of prompts (density)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


class _Measure:
    """Lengths of prompts in tokens of a model, or in characters."""

    def __init__(self, model: str | None) -> None:
        self._tokenizer = None if model is None else load_tokenizer(model)
        self.unit = "characters" if model is None else "tokens"

    def lengths(self, rows: Sequence[Mapping[str, Any]]) -> list[int]:
        if self._tokenizer is None:
            return [sum(len(m["content"]) for m in row["prompt"]) for row in rows]
        texts = [render_chat(self._tokenizer, row["prompt"], {}) for row in rows]
        return count_tokens(self._tokenizer, texts)


def _summary(lengths: Sequence[int]) -> dict[str, float]:
    if not lengths:
        return {"min": 0, "median": 0, "mean": 0, "max": 0}
    return {
        "min": min(lengths),
        "median": median(lengths),
        "mean": round(fmean(lengths), 1),
        "max": max(lengths),
    }
