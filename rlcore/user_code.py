"""Loads Python files named in the configuration, under one stable module name in every process.

The name follows from the file's path only, so that classes and functions of such a file pickle by
reference between processes that have loaded it.
"""

import hashlib
import importlib.util
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rlcore.errors import ConfigError

logger = logging.getLogger(__name__)

PREFIX = "rollflow_user_code"


def user_module_name(path: str | Path) -> str:
    """Return the module name of a file: its own name and a digest of its absolute path."""
    resolved = Path(path).resolve()
    digest = hashlib.sha256(str(resolved).encode()).hexdigest()[:10]
    return f"{PREFIX}_{re.sub(r'[^A-Za-z0-9_]', '_', resolved.stem)}_{digest}"


def load_user_module(path: str | Path) -> ModuleType:
    """Return the module of a file, executed once per process.

    Raises:
        ConfigError: the file is missing, not Python, or raises when executed (the cause is
            attached).
    """
    resolved = Path(path).resolve()
    if not resolved.is_file() or resolved.suffix != ".py":
        raise ConfigError(f"{path}: no such Python file")
    name = user_module_name(resolved)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    # Before execution: decorators and data classes look their module up.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        # The file is the user's and may raise anything; the cause is passed on whole.
        raise ConfigError(f"{path}: cannot be imported: {type(error).__name__}: {error}") from error
    return module


def load_user_modules(paths: Sequence[str | Path]) -> list[ModuleType]:
    """Load every file, in order, for what it registers.

    Raises:
        ConfigError: a file cannot be loaded.
    """
    return [load_user_module(path) for path in paths]


def load_user_object(path: str | Path, name: str) -> Any:
    """Return what a file calls `name`.

    Raises:
        ConfigError: the file cannot be loaded or defines no such name; lists what it defines.
    """
    module = load_user_module(path)
    try:
        return getattr(module, name)
    except AttributeError:
        names = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(
            f"{path} defines no {name!r}; it defines {', '.join(sorted(names)) or 'nothing'}"
        ) from None
