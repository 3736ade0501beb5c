"""Which agent loop a row gets: the registered ones and those of the run's YAML list.

    - name: my_agent
      _target_: my_agents.MyAgentLoop
      depth: 3            # any other key goes to the constructor

A `_target_` module is looked for beside the YAML first, then among the installed ones.
"""

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlcore.agent_loop.base import AGENT_LOOPS, AgentLoopBase
from rlcore.errors import ConfigError
from rlcore.user_code import load_user_object


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentLoopChoice:
    """A class and the constructor arguments that its list entry names."""

    loop_class: type[AgentLoopBase]
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


class AgentLoopChooser:
    """The agent loops of a run by name.

    Example:
        >>> chooser = AgentLoopChooser("single_turn_agent", None)
        >>> chooser.choose(row.get("agent_name")).loop_class
    """

    def __init__(self, default: str, list_path: str | None) -> None:
        """Read the list.

        Raises:
            ConfigError: the list or one of its entries is wrong, or no loop is called `default`.
        """
        self._default = default
        self._listed = read_agent_loops(list_path) if list_path is not None else {}
        self.choose(None)

    def choose(self, name: str | None) -> AgentLoopChoice:
        """Return the loop of that name, or the default one.

        Raises:
            ConfigError: there is none; lists those there are.
        """
        wanted = name or self._default
        if wanted in self._listed:
            return self._listed[wanted]
        if wanted in AGENT_LOOPS:
            return AgentLoopChoice(loop_class=AGENT_LOOPS.get(wanted))
        known = sorted({*self._listed, *AGENT_LOOPS})
        raise ConfigError(
            f"unknown agent loop {wanted!r}; known: {', '.join(known)} (a row's agent_name, "
            "actor_rollout_ref.rollout.agent.default_agent_loop)"
        )


def read_agent_loops(path: str) -> dict[str, AgentLoopChoice]:
    """Return the agent loops of a YAML list.

    Raises:
        ConfigError: the file cannot be read, or an entry is wrong; names it.
    """
    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} (agent_loop_config_path): {error}") from error
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: must be a list of {{name, _target_, ...}}")
    choices: dict[str, AgentLoopChoice] = {}
    for number, entry in enumerate(entries):
        where = f"{path} entry {number}"
        if not isinstance(entry, dict) or not {"name", "_target_"} <= entry.keys():
            raise ConfigError(f"{where}: needs name and _target_, is {entry!r}")
        name = str(entry["name"])
        if name in choices:
            raise ConfigError(f"{where}: the name {name!r} is there twice")
        kwargs = {str(key): entry[key] for key in entry if key not in {"name", "_target_"}}
        loop_class = _load_target(str(entry["_target_"]), Path(path).parent, where)
        choices[name] = AgentLoopChoice(loop_class=loop_class, kwargs=kwargs)
    return choices


def _load_target(target: str, folder: Path, where: str) -> type[AgentLoopBase]:
    module_name, _, class_name = target.rpartition(".")
    beside = folder.joinpath(*module_name.split(".")).with_suffix(".py") if module_name else None
    try:
        if beside is not None and beside.is_file():
            found = load_user_object(beside, class_name)
        else:
            found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{where}: _target_ {target}: {error}") from error
    if not isinstance(found, type) or not issubclass(found, AgentLoopBase):
        raise ConfigError(f"{where}: _target_ {target} is no subclass of AgentLoopBase")
    return found
