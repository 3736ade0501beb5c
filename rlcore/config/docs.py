"""Writes what is generated from the code: the README's tables and the JSON Schema of presets.

`python -m rlcore.config.docs` writes them (`make docs`); with `--check` it only says what is old.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from rlcore.config.argument_table import ARGUMENTS, ESTIMATORS, LOSSES, Argument
from rlcore.config.deviations import DEVIATIONS
from rlcore.config.names import KINDS
from rlcore.config.schema import json_schema
from rlcore.config.tree import markers

ROOT = Path(__file__).resolve().parents[2]
SCHEMA_FILE = Path("deployments/preset.schema.json")
README = Path("README.md")


def generated() -> dict[Path, str]:
    """Return the contents that every generated file should have."""
    readme = (ROOT / README).read_text(encoding="utf-8")
    for name, lines in _tables().items():
        readme = _between_markers(readme, name, "\n".join(lines))
    schema = json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"
    return {README: readme, SCHEMA_FILE: schema}


def _tables() -> dict[str, list[str]]:
    return {
        "names": list(_names()),
        "differences": list(_differences()),
        "arguments": list(_arguments()),
    }


def _between_markers(text: str, name: str, content: str) -> str:
    begin, end = f"<!-- {name}: written by `make docs` -->", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{README} has no markers {begin} … {end}")
    return f"{before}{begin}\n{content}\n{end}{after}"


def _names() -> Iterator[str]:
    yield "| key | works | not yet |"
    yield "|---|---|---|"
    for kind in KINDS:
        missing = [name for name in kind.not_yet if name not in kind.works]
        yield f"| `{kind.key}` | {_listed(kind.works)} | {_listed(missing)} |"


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"


def _differences() -> Iterator[str]:
    yield "| key | here | verl | to get verl's behaviour |"
    yield "|---|---|---|---|"
    for row in DEVIATIONS:
        keys = ", ".join(f"`{key.replace('actor_rollout_ref.', '')}`" for key in row.keys)
        yield f"| {keys} | {row.here} | {row.verl} | {row.restore} |"


def _arguments() -> Iterator[str]:
    yield "| argument | of | key | how | verl, and what restores it | read |"
    yield "|---|---|---|---|---|---|"
    names = _names_of_functions()
    rows: dict[tuple[str, ...], list[str]] = {}
    for row in ARGUMENTS:
        key = f"`{row.key.replace('actor_rollout_ref.', '')}`" if row.key else "-"
        verl = f"{row.verl}; {row.restore}" if row.verl else "the same"
        state = "yes" if is_read(row) else "not yet"
        told = (row.name, key, row.conversion or "as it is", verl, state)
        rows.setdefault(told, []).append(f"`{row.function}`{names.get(row.function, '')}")
    for (name, key, how, verl, state), functions in rows.items():
        yield f"| {name} | {', '.join(functions)} | {key} | {how} | {verl} | {state} |"


def _names_of_functions() -> dict[str, str]:
    """Return the names that choose a function, in brackets."""
    found: dict[str, list[str]] = {}
    for table in (ESTIMATORS, LOSSES):
        for name, function in table.items():
            found.setdefault(function, []).append(f"`{name}`")
    return {function: f" ({', '.join(names)})" for function, names in found.items()}


def is_read(row: Argument) -> bool:
    """Return whether the argument's key has an effect today."""
    return row.key not in markers() and not _is_missing(row.function)


def _is_missing(function: str) -> bool:
    """Whether no name that chooses the function works yet."""
    for key, table in (("algorithm.adv_estimator", ESTIMATORS), ("", LOSSES)):
        names = {name for name, chosen in table.items() if chosen == function}
        if names:
            kind = next(k for k in KINDS if k.key == key or (not key and "loss_mode" in k.key))
            return not names & set(kind.works)
    return False


def main(arguments: list[str]) -> int:
    """Write the files, or say which are not current."""
    old = [
        path
        for path, text in generated().items()
        if not (ROOT / path).is_file() or (ROOT / path).read_text(encoding="utf-8") != text
    ]
    if "--check" in arguments:
        for path in old:
            print(f"{path} is not current; `make docs` writes it", file=sys.stderr)
        return 1 if old else 0
    for path, text in generated().items():
        (ROOT / path).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
