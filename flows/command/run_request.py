"""What a command line asks for: a preset with overrides, or a script of verl's."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.config.load import Examination, examine
from rlcore.config.overrides import overrides_as_dict
from rlcore.config.problems import report
from rlcore.config.run import RunConfig
from rlcore.config.script import ScriptExamination, examine_script
from rlcore.errors import ConfigError, UnsupportedVerlKeyError


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request, examined; its parts are those of the flow `train`."""

    preset: str | None
    overrides: tuple[str, ...]
    """As they were typed."""
    config: dict[str, Any] | None
    examination: Examination
    script: ScriptExamination | None

    def values(self) -> dict[str, Any]:
        """Return the overrides as the flow takes them; those of a script are in `config`."""
        return {} if self.script else overrides_as_dict(self.overrides)

    def resolved(self) -> RunConfig:
        """Return the configuration.

        Raises:
            ConfigError: it cannot be run; every problem is listed, and of a script what is
                honoured and satisfied besides.
        """
        found = self.examination
        if found.config is not None and not found.problems:
            return found.config
        text = report(found.problems, found.source)
        if self.script is not None:
            text += "\n" + "\n".join(script_lines(self.script))
        if all(problem.is_unsupported for problem in found.problems):
            raise UnsupportedVerlKeyError(text)
        raise ConfigError(text)


def read_request(
    preset: str | None, overrides: Sequence[str] | None, from_verl: str | None
) -> Request:
    """Read and examine what was asked for.

    Args:
        preset: Name or path; with `from_verl`, what stands in its place on the command line is an
            override.
        overrides: In Hydra's syntax.
        from_verl: A command or script of verl's, its overrides alone, or the path of a script.

    Raises:
        ConfigError: there is neither a preset nor a script, or both; or it cannot be read at all.
    """
    words = tuple(overrides or ())
    if from_verl is None:
        if preset is None:
            raise ConfigError("give a preset (`rollflow check grpo-tiny`), or --from-verl SCRIPT")
        found = examine(preset, words)
        return Request(preset=preset, overrides=words, config=None, examination=found, script=None)
    if preset is not None:
        if "=" not in preset and not preset.startswith("~"):
            raise ConfigError(f"give a preset ({preset}) or --from-verl, not both")
        words = (preset, *words)
    script = examine_script(from_verl, words, os.environ)
    return Request(
        preset=None,
        overrides=words,
        config=script.tree,
        examination=script.examination,
        script=script,
    )


def script_lines(script: ScriptExamination) -> list[str]:
    """Return which keys of a script are honoured, satisfied and refused, for a person."""
    lines: list[str] = []
    classes = (
        ("honoured", script.honoured),
        ("satisfied anyway, or without effect", script.satisfied),
        ("refused", script.refused),
    )
    for title, keys in classes:
        lines += ["", f"{title} ({len(keys)}):", *(f"  {key}" for key in keys)]
    return lines
