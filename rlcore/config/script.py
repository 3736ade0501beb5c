"""A script of verl's, read: which of its keys are honoured, satisfied, refused.

`python3 -m verl.trainer.main_ppo key=value …`, with all that shells do to it, or the list of
overrides alone. verl's defaults stand where the script says nothing and ours would compute
something else (`rlcore.config.deviations`), so that its meaning is kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rlcore.config.deviations import in_our_terms, verl_base
from rlcore.config.load import Examination, apply_overrides, examine_tree
from rlcore.config.overrides import parse_overrides
from rlcore.config.problems import Problem, show
from rlcore.config.shell import read_commands, unknown_in
from rlcore.config.tree import Tree, honoured_fields, leaves, merge, remove
from rlcore.errors import ConfigError

MODULE: Final = "verl.trainer.main_ppo"
_FILE: Final = "main_ppo.py"
_CONFIG_NAMES: Final = ("ppo_trainer", "ppo_trainer.yaml")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptExamination:
    """What came of a script."""

    examination: Examination
    tree: Tree
    """To be given to the flow as its `config`: the script over verl's defaults."""
    honoured: tuple[str, ...]
    """`key=value` of the script that are read."""
    satisfied: tuple[str, ...]
    """`key=value: reason` of those that ask for what happens anyway."""
    refused: tuple[str, ...]
    """Dotted keys of the problems."""


def read_script(text: str, environment: Mapping[str, str]) -> tuple[list[str], list[Problem]]:
    """Return the overrides of a script, and what of it cannot be followed.

    Args:
        text: The script, the command alone, or the overrides alone; or the path of a file.
        environment: Variables that are set before it starts (`$HOME`).

    Raises:
        ConfigError: it starts something else than verl's PPO trainer, or nothing.
    """
    script = _text_of(text)
    commands = read_commands(script, environment, has_assignments=_FILE[:-3] in script)
    words = _words_of_main(commands)
    overrides: list[str] = []
    problems: list[Problem] = []
    rest = iter(words)
    for word in rest:
        reason = unknown_in(word)
        if reason is not None:
            problems.append(_unknown_word(word, reason))
        elif word.startswith("-"):
            problems += _option(word, rest)
        else:
            overrides.append(word)
    return overrides, problems


def _text_of(text: str) -> str:
    if "\n" in text or "=" in text:
        return text
    path = Path(text.strip()).expanduser()
    if not path.is_file():
        raise ConfigError(f"--from-verl {text}: neither a command with overrides nor a file")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--from-verl {path}: cannot be read: {error}") from error


def _words_of_main(commands: list[list[str]]) -> list[str]:
    started = [words for words in commands if any(map(_is_main, words))]
    if len(started) > 1:
        raise ConfigError(
            f"--from-verl: the script starts {MODULE} {len(started)} times; give one of them"
        )
    if started:
        (words,) = started
        place = next(index for index, word in enumerate(words) if _is_main(word))
        return words[place + 1 :]
    other = next((words for words in commands if _is_python(words)), None)
    if other is not None:
        raise ConfigError(
            f"--from-verl: {' '.join(other[:4])} is not `python3 -m {MODULE}`, the one entry point "
            "of verl that is understood"
        )
    words = [word for command in commands for word in command]
    if not words:
        raise ConfigError("--from-verl: there are no overrides in it")
    return words


def _is_main(word: str) -> bool:
    return word in {MODULE, _FILE} or word.endswith(f"/{_FILE}")


def _is_python(words: Sequence[str]) -> bool:
    return any(Path(word).name.startswith("python") for word in words[:3] if "=" not in word)


def _unknown_word(word: str, reason: str) -> Problem:
    key, _, _ = word.partition("=")
    return Problem(
        path=key.lstrip("+~") if unknown_in(key) is None else "the script",
        has_value=False,
        reason=reason,
        fix="write the value itself, or export the variable first",
    )


def _option(word: str, rest: Iterator[str]) -> list[Problem]:
    name, has_value, value = word.partition("=")
    if name in {"--config-path", "--config-name", "--config-dir", "-cn", "-cp"}:
        chosen = value if has_value else next(rest, "")
        if name in {"--config-name", "-cn"} and chosen in _CONFIG_NAMES:
            return []
        return [
            Problem(
                path=name,
                value=chosen,
                reason="configuration files of verl's are not read",
                fix="give the keys of that file as overrides; `ppo_trainer` is what is meant",
            )
        ]
    return [Problem(path=word, has_value=False, reason="it is no override", fix="leave it out")]


def examine_script(
    text: str, overrides: Sequence[str], environment: Mapping[str, str]
) -> ScriptExamination:
    """Read a script and check what it asks for.

    Args:
        text: See `read_script`.
        overrides: Further ones, in Hydra's syntax; they win.
        environment: Variables that are set before it starts.

    Raises:
        ConfigError: see `read_script`.
    """
    words, problems = read_script(text, environment)
    changes, unreadable = parse_overrides([*words, *overrides])
    given, misplaced = apply_overrides({}, changes)
    given, changed = in_our_terms(given)
    tree = merge(verl_base(given), given)
    found = examine_tree("the script", tree, ())
    for problem in found.problems:
        if problem.is_idle:  # what has no effect in verl either does not stop a script
            tree = remove(tree, problem.path)
            changed[problem.path] = f"{problem.path}={show(problem.value)}: {problem.reason}"
    found = examine_tree("the script", tree, ())
    all_problems = [*problems, *unreadable, *misplaced, *found.problems]
    refused = tuple(dict.fromkeys(problem.path for problem in all_problems))
    return ScriptExamination(
        examination=Examination(
            config=found.config,
            problems=all_problems,
            notices=[*changed.values(), *found.notices],
            source="the script" + (f" with {len(overrides)} overrides" if overrides else ""),
            tree=found.tree,
        ),
        tree=found.tree,
        honoured=tuple(
            f"{path}={show(value)}"
            for path, value in leaves(given)
            if path in honoured_fields() and path not in {*refused, *changed}
        ),
        satisfied=tuple(
            notice
            for notice in [*changed.values(), *found.notices]
            if notice.split("=")[0] not in refused
        ),
        refused=refused,
    )
