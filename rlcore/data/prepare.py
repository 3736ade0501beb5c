"""Makes models and data sets for the presets, each once: a complete folder is left as it is."""

import json
import logging
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlcore.data.parquet import write_rows
from rlcore.data.staging import is_complete, staged_folder
from rlcore.errors import DataError
from rlcore.reward.extraction import extract_last_integer

logger = logging.getLogger(__name__)

SMOLLM2_FOLDER = Path("models/smollm2-135m-instruct")
SMOLLM2_RECIPE = {"kind": "smollm2-135m-instruct", "format": "1"}
# Sums of two numbers of one or two digits: hard enough for a 135M model (8 % right before
# training), learnable in 40 steps. reasoning-gym's own default would teach it nothing.
CHAIN_SUM_DIFFICULTY: dict[str, Any] = {
    "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2,
}  # fmt: skip
DEFAULT_DIFFICULTY = {"chain_sum": CHAIN_SUM_DIFFICULTY}
# reasoning-gym draws with repetition: this many draws per wanted question, then the task is taken
# to have too few distinct questions.
MAX_DRAWS_PER_QUESTION = 20


def prepare_smollm2(out_dir: str | Path = SMOLLM2_FOLDER) -> Path:
    """Write SmolLM2-135M-Instruct to `out_dir` as a Hugging Face folder; about 20 s, once.

    Raises:
        DataError: the package with the model is not installed, or `out_dir` holds other files.
    """
    folder = Path(out_dir)
    if not is_complete(folder, SMOLLM2_RECIPE):
        # Only this preparation needs torch.
        from rlcore.data.smollm2 import export_smollm2

        export_smollm2(folder, SMOLLM2_RECIPE)
        logger.info("wrote %s", folder)
    return folder


def prepare_tiny(out_dir: str | Path = ".") -> tuple[Path, Path]:
    """Write the tiny model to `out_dir`/models/tiny and its data to `out_dir`/data/tiny.

    Returns:
        The model folder and the data folder.
    """
    model_folder = Path(out_dir) / "models" / "tiny"
    data_folder = Path(out_dir) / "data" / "tiny"
    model_recipe = {"kind": "tiny-model", "format": "1"}
    data_recipe = {"kind": "tiny-data", "format": "1"}
    if is_complete(model_folder, model_recipe) and is_complete(data_folder, data_recipe):
        return model_folder, data_folder
    from rlcore.testing.tiny_model import build_tiny_model, write_tiny_data

    with staged_folder(model_folder, model_recipe) as staging:
        build_tiny_model(staging)
    with staged_folder(data_folder, data_recipe) as staging:
        write_tiny_data(staging)
    return model_folder, data_folder


def prepare_reasoning_gym(
    task: str,
    out_dir: str | Path,
    size: int = 2000,
    test_size: int = 256,
    seed: int = 0,
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
        **difficulty: The task's own settings, over those of `DEFAULT_DIFFICULTY`.

    Raises:
        DataError: unknown task or setting, or too few distinct questions at this difficulty.
    """
    folder = Path(out_dir)
    difficulty = {**DEFAULT_DIFFICULTY.get(task, {}), **difficulty}
    recipe = {
        "kind": f"reasoning_gym/{task}", "format": "1", "version": version("reasoning-gym"),
        "size": size, "test_size": test_size, "seed": seed, "difficulty": difficulty,
    }  # fmt: skip
    if is_complete(folder, recipe):
        return folder
    entries = _draw_distinct(task, size + test_size, seed, difficulty)
    # The rule scores what the extraction finds; only integers can be found as the last integer.
    is_integer = all(extract_last_integer(entry["answer"]) == entry["answer"] for entry in entries)
    extraction = "last_integer" if is_integer else "stripped"
    splits = {"train": entries[:size], "test": entries[size:]}
    with staged_folder(folder, recipe) as staging:
        for split, part in splits.items():
            rows = [_row(task, split, index, e, extraction) for index, e in enumerate(part)]
            write_rows(staging / f"{split}.parquet", rows)
    logger.info("wrote %s: %d training and %d held-out questions", folder, size, test_size)
    return folder


def _draw_distinct(
    task: str, count: int, seed: int, difficulty: dict[str, Any]
) -> list[dict[str, Any]]:
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
        distinct.setdefault(entry["question"], entry)
        if len(distinct) == count:
            return list(distinct.values())
    raise DataError(
        f"reasoning-gym task {task!r} with {difficulty} has too few distinct questions: "
        f"{len(distinct)} found in {draws} draws, {count} wanted; lower size or test_size, or "
        "raise the difficulty"
    )


def _row(
    task: str, split: str, index: int, entry: dict[str, Any], extraction: str
) -> dict[str, Any]:
    return {
        "data_source": f"reasoning_gym/{task}",
        "prompt": [{"role": "user", "content": entry["question"]}],
        "reward_model": {"style": "rule", "ground_truth": entry["answer"]},
        "extra_info": {
            "index": index,
            "split": split,
            "question": entry["question"],
            # JSON, not a struct: entries of one task may differ in their keys.
            "entry": json.dumps(entry),
            "extraction": extraction,
        },
    }
