"""Data sets from reasoning-gym's generators: any task, by its own settings or by a level."""

import dataclasses
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlcore.data.prepared import write_prepared
from rlcore.data.staging import is_complete
from rlcore.errors import DataError
from rlcore.reward.extraction import extract_last_integer

# Sums of two numbers of one or two digits: hard enough for a 135M model (8 % right before
# training), learnable in 40 steps. reasoning-gym's own default would teach it nothing.
CHAIN_SUM_DIFFICULTY: dict[str, Any] = {
    "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2,
}  # fmt: skip
DEFAULT_DIFFICULTY = {"chain_sum": CHAIN_SUM_DIFFICULTY}
# reasoning-gym draws with repetition: this many draws per wanted question, then the task is taken
# to have too few distinct questions.
MAX_DRAWS_PER_QUESTION = 20


def prepare_reasoning_gym(
    task: str,
    out_dir: str | Path,
    size: int = 2000,
    test_size: int = 256,
    seed: int = 0,
    level: int | None = None,
    model: str | None = None,
    **difficulty: Any,
) -> Path:
    """Write `size` training and `test_size` held-out questions of a reasoning-gym task.

    Questions are distinct by their text over both files, so the held-out set is really held out.
    The last ones drawn are held out.

    Args:
        task: Name in reasoning-gym, e.g. `chain_sum`.
        out_dir: Folder for train.parquet and test.parquet.
        size: Distinct training questions.
        test_size: Distinct held-out questions.
        seed: Seed of the draws.
        level: Difficulty by the task's own curriculum, from 0: every setting of it at that level,
            or at its highest. None: the task's defaults, or those of `DEFAULT_DIFFICULTY`.
        model: Model folder whose tokens measure the questions; None: characters.
        **difficulty: The task's own settings, over those of level or defaults.

    Raises:
        DataError: unknown task, level or setting, too few distinct questions at this difficulty, or
            a task whose verifier cannot judge rows that are stored.
    """
    folder = Path(out_dir)
    if level is None:
        difficulty = {**DEFAULT_DIFFICULTY.get(task, {}), **difficulty}
    recipe = {
        "kind": f"reasoning_gym/{task}", "format": "2", "version": version("reasoning-gym"),
        "size": size, "test_size": test_size, "seed": seed, "level": level, "model": model,
        "difficulty": difficulty,
    }  # fmt: skip
    if is_complete(folder, recipe):
        return folder
    if level is not None:
        difficulty = {**_settings_of_level(task, level), **difficulty}
    entries, num_read = _draw_distinct(task, size + test_size, seed, difficulty)
    # The rule scores what the extraction finds; only integers can be found as the last integer.
    answers = [str(entry["answer"]) for entry in entries]
    is_integer = all(extract_last_integer(answer) == answer for answer in answers)
    extraction = "last_integer" if is_integer else "stripped"
    write_prepared(
        folder,
        recipe,
        train=[_row(task, "train", i, e, extraction) for i, e in enumerate(entries[:size])],
        test=[_row(task, "test", i, e, extraction) for i, e in enumerate(entries[size:])],
        num_read=num_read,
        num_duplicates=num_read - len(entries),
        model=model,
        notes=[f"difficulty {json.dumps(difficulty, default=str)}"] if difficulty else [],
    )
    return folder


def _settings_of_level(task: str, level: int) -> dict[str, Any]:
    from reasoning_gym.factory import create_curriculum

    try:
        curriculum = create_curriculum(task)
    except ValueError as error:
        raise DataError(
            f"reasoning-gym task {task!r} has no levels ({error}); give its own settings instead"
        ) from error
    highest = max(len(attribute.levels) for attribute in curriculum.attributes.values()) - 1
    if not isinstance(level, int) or not 0 <= level <= highest:
        raise DataError(f"reasoning-gym task {task!r} has the levels 0 to {highest}, not {level}")
    for name, attribute in curriculum.attributes.items():
        curriculum.set_attr_level(name, min(level, len(attribute.levels) - 1))
    settings = dataclasses.asdict(curriculum.generate_configuration())
    return {name: value for name, value in settings.items() if name not in {"seed", "size"}}


def _draw_distinct(
    task: str, count: int, seed: int, difficulty: dict[str, Any]
) -> tuple[list[dict[str, Any]], int]:
    """Return `count` entries with distinct questions, and how many were drawn for them."""
    # Takes 2 s to import; models and tiny data need none of it.
    import reasoning_gym

    draws = count * MAX_DRAWS_PER_QUESTION
    try:
        source = reasoning_gym.create_dataset(task, size=draws, seed=seed, **difficulty)
    except (ValueError, TypeError, AssertionError) as error:
        raise DataError(f"reasoning-gym task {task!r} with {difficulty}: {error}") from error
    distinct: dict[str, dict[str, Any]] = {}
    for position in range(draws):
        entry = source[position]
        distinct.setdefault(" ".join(entry["question"].split()), entry)
        if len(distinct) == count:
            return list(distinct.values()), position + 1
    raise DataError(
        f"reasoning-gym task {task!r} with {difficulty} has too few distinct questions: "
        f"{len(distinct)} found in {draws} draws, {count} wanted; lower size or test_size, or "
        "raise the difficulty"
    )


def _row(
    task: str, split: str, index: int, entry: dict[str, Any], extraction: str
) -> dict[str, Any]:
    try:
        # JSON, not a struct: entries of one task may differ in their keys.
        stored = json.dumps(entry)
    except TypeError as error:
        raise DataError(f"reasoning-gym task {task!r}: an entry is no JSON: {error}") from error
    answer = entry["answer"]
    return {
        "data_source": f"reasoning_gym/{task}",
        "prompt": [{"role": "user", "content": entry["question"]}],
        # Some tasks have many right answers and name none: their verifier judges by the entry.
        "reward_model": {"style": "rule", "ground_truth": "" if answer is None else answer},
        "extra_info": {
            "index": index,
            "split": split,
            "question": entry["question"],
            "entry": stored,
            "extraction": extraction,
        },
    }
