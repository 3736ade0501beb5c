"""Presets: YAML files in deployments/runs, or anywhere else."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any, cast

import yaml

from rlcore.config.problems import nearest
from rlcore.config.tree import Tree
from rlcore.errors import ConfigError

_FOLDERS = (
    Path("deployments/runs"),
    Path(__file__).resolve().parents[2] / "deployments" / "runs",
)
"""Where a preset's name is looked for: the project one stands in, then the installed one."""


def preset_names() -> list[str]:
    """Return the names of all presets, sorted."""
    return sorted({path.stem for folder in _FOLDERS for path in folder.glob("*.yaml")})


def find_preset(preset: str | Path) -> Path:
    """Return the file of a preset.

    Args:
        preset: a name (`grpo-tiny`), or the path of a YAML file.

    Raises:
        ConfigError: there is no such file.
    """
    given = Path(preset)
    if given.suffix in {".yaml", ".yml"}:
        if given.is_file():
            return given
        raise ConfigError(f"preset {preset}: there is no such file in {Path.cwd()}")
    for folder in _FOLDERS:
        path = folder / f"{preset}.yaml"
        if path.is_file():
            return path
    known = preset_names()
    guess = nearest(str(preset), known)
    raise ConfigError(
        f"preset {preset!r}: there is none of that name"
        + (f"; did you mean {guess}?" if guess else "")
        + f" (known: {', '.join(known) or 'none'}; or give the path of a YAML file)"
    )


def read_preset(preset: str | Path | None) -> tuple[str, Tree]:
    """Return a preset's name for messages, and its tree; an empty tree for None.

    Raises:
        ConfigError: there is no such file, or it is no YAML mapping with one value per key.
    """
    if preset is None:
        return "no preset", {}
    path = find_preset(preset)
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_OneValuePerKey)
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"preset {path} cannot be read: {error}") from error
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"preset {path} must hold sections such as `data:`, not one value")
    return f"preset {preset}", cast(Tree, tree)


class _OneValuePerKey(yaml.SafeLoader):
    """YAML as it is safe to read, but for keys given twice, of which YAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        mapping = super().construct_mapping(node, deep=deep)  # puts in what `<<` brings
        if len(set(keys)) < len(keys):
            raise yaml.constructor.ConstructorError(
                None, None, "a key is given twice", node.start_mark
            )
        if not all(isinstance(key, str) for key in mapping):
            raise yaml.constructor.ConstructorError(None, None, "a key is no word", node.start_mark)
        return mapping
