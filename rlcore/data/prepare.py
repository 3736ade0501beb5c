"""Makes models and data sets for the presets, each once: a complete folder is left as it is."""

import logging
from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from rlcore.data.environments import prepare_textarena
from rlcore.data.prepared import PreparedReport, read_report
from rlcore.data.questions import prepare_questions
from rlcore.data.reasoning_gym import CHAIN_SUM_DIFFICULTY, prepare_reasoning_gym
from rlcore.data.staging import is_complete, staged_folder
from rlcore.errors import ConfigError

__all__ = [
    "CHAIN_SUM_DIFFICULTY",
    "SMOLLM2_FOLDER",
    "SMOLLM2_RECIPE",
    "PreparedReport",
    "prepare_named",
    "prepare_questions",
    "prepare_reasoning_gym",
    "prepare_smollm2",
    "prepare_textarena",
    "prepare_tiny",
    "read_report",
]

logger = logging.getLogger(__name__)

PLACES = ("file", "out_dir")
"""Of `prepare_questions`: given as file= and out=."""
SMOLLM2_FOLDER = Path("models/smollm2-135m-instruct")
SMOLLM2_RECIPE = {"kind": "smollm2-135m-instruct", "format": "1"}


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


def prepare_named(name: str, out: str | None, settings: Mapping[str, Any]) -> list[Path]:
    """Make what `rollflow prepare NAME` asks for; return the folders.

    Args:
        name: `smollm2`, `tiny`, `questions`, `textarena`, or a task of reasoning-gym.
        out: Folder; None: below `models` and `data`.
        settings: Of `prepare_questions`, `prepare_textarena` or `prepare_reasoning_gym`; the models
            have none.

    Raises:
        ConfigError: a setting is unknown or missing.
        DataError: a file, row or task is wrong.
    """
    if name in {"smollm2", "tiny"}:
        if settings:
            raise ConfigError(f"prepare {name} takes out=FOLDER only, not {', '.join(settings)}")
        if name == "tiny":
            return list(prepare_tiny(out or "."))
        return [prepare_smollm2(out or SMOLLM2_FOLDER)]
    if name == "questions":
        return [_prepare_questions(out, dict(settings))]
    wrong = [key for key in ("size", "test_size", "seed") if not _is_count(settings.get(key, 0))]
    if wrong:
        raise ConfigError(f"prepare {name}: {', '.join(wrong)} must be whole numbers from 0")
    if name == "textarena":
        return [_prepare_textarena(out, dict(settings))]
    return [prepare_reasoning_gym(name, out or str(Path("data") / name), **settings)]


def _prepare_questions(out: str | None, settings: dict[str, Any]) -> Path:
    file = settings.pop("file", None)
    if file is None:
        raise ConfigError("prepare questions needs file=FILE, a .csv, .tsv or .jsonl")
    known = [name for name in signature(prepare_questions).parameters if name not in PLACES]
    unknown = sorted(settings.keys() - set(known))
    if unknown:
        raise ConfigError(
            f"prepare questions has no {', '.join(unknown)}; it takes out, file, {', '.join(known)}"
        )
    return prepare_questions(file, out or Path("data") / Path(file).stem, **settings)


def _prepare_textarena(out: str | None, settings: dict[str, Any]) -> Path:
    game = settings.pop("game", None)
    if not isinstance(game, str):
        raise ConfigError("prepare textarena needs game=NAME, such as FrozenLake-v0-random")
    return prepare_textarena(game, out or Path("data") / game.lower(), **settings)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
