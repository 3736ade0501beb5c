"""Data sets of episodes: a row is the first observation of an environment and the seed of it."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlcore.data.prepared import write_prepared
from rlcore.data.staging import is_complete
from rlcore.environments.base import EnvironmentSpec
from rlcore.environments.host import Episode
from rlcore.errors import ConfigError, DataError

MAX_DRAWS_PER_EPISODE = 20


def prepare_textarena(
    game: str,
    out_dir: str | Path,
    *,
    size: int = 256,
    test_size: int = 64,
    seed: int = 0,
    system: str | None = None,
    model: str | None = None,
    **settings: Any,
) -> Path:
    """Write train.parquet and test.parquet of a game of TextArena, for `environment_agent`.

    Episodes are distinct by their first observation over both files, so that the held-out ones are
    really held out: a game that hides everything at first, such as guessing a number, has too few.

    Args:
        game: Name in TextArena, such as `FrozenLake-v0-random`; for one player.
        out_dir: Folder for the result.
        size: Training episodes.
        test_size: Held-out episodes.
        seed: Seed of the first episode; the others follow.
        system: System message before every first observation.
        model: Model folder whose tokens measure the prompts; None: characters.
        **settings: The game's own.

    Raises:
        ConfigError: TextArena is not installed.
        DataError: there is no such game or setting, or too few distinct episodes.
    """
    folder = Path(out_dir)
    recipe = {
        "kind": f"textarena/{game}", "format": "1", "version": _version("textarena"),
        "size": size, "test_size": test_size, "seed": seed, "system": system, "model": model,
        "settings": settings,
    }  # fmt: skip
    if is_complete(folder, recipe):
        return folder
    episodes, num_drawn = _draw_distinct(game, size + test_size, seed, settings)
    rows = [_row(spec, text, system) for text, spec in episodes.items()]
    for split, part in (("train", rows[:size]), ("test", rows[size:])):
        for index, row in enumerate(part):
            row["extra_info"] |= {"index": index, "split": split}
    write_prepared(
        folder,
        recipe,
        train=rows[:size],
        test=rows[size:],
        num_read=num_drawn,
        num_duplicates=num_drawn - len(rows),
        model=model,
        notes=["sessions need agent loop environment_agent"],
    )
    return folder


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError as error:
        raise ConfigError(
            f"the package {package} is not installed (`pip install 'rollflow[{package}]'`)"
        ) from error


def _draw_distinct(
    game: str, count: int, seed: int, settings: dict[str, Any]
) -> tuple[dict[str, EnvironmentSpec], int]:
    """Return first observation -> episode, and how many were drawn for them."""
    draws = count * MAX_DRAWS_PER_EPISODE
    distinct: dict[str, EnvironmentSpec] = {}
    for position in range(draws):
        spec = EnvironmentSpec(
            library="textarena", name=game, seed=seed + position, settings=settings
        )
        distinct.setdefault(Episode(spec).first.text, spec)
        if len(distinct) == count:
            return distinct, position + 1
    raise DataError(
        f"textarena game {game} with {settings} has too few distinct episodes: {len(distinct)} "
        f"first observations in {draws} draws, {count} wanted; lower size or test_size, or choose "
        "another game or setting"
    )


def _row(spec: EnvironmentSpec, text: str, system: str | None) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system else []
    return {
        "data_source": f"textarena/{spec.name}",
        "prompt": [*messages, {"role": "user", "content": text}],
        "reward_model": {"style": "environment", "ground_truth": ""},
        "extra_info": {"question": text, "environment": spec.to_json()},
        "agent_name": "environment_agent",
    }
