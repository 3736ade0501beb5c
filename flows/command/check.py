"""`rollflow check`, `schema`, `doctor` and `check-env`: what is looked at before a run."""

import dataclasses
import os
from typing import Annotated, Any

import typer

from flows.command.command_line import (
    REFUSED,
    FromVerl,
    MaybePreset,
    Overrides,
    Preset,
    RunsRoot,
    checked_data,
    print_json,
    tell_notices,
)
from rlcore.config.problems import Problem
from rlcore.errors import ConfigError, DataError


def check(
    preset: MaybePreset = None,
    overrides: Overrides = None,
    from_verl: FromVerl = None,
    data: Annotated[
        bool, typer.Option("--data", help="Read and tokenise data and model folder too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    show_all: Annotated[
        bool, typer.Option("--all", help="Print every key, not only what differs from defaults.")
    ] = False,
) -> None:
    """Check a configuration without starting anything; lists every problem at once."""
    from flows.command.run_request import read_request
    from rlcore.config import report

    if as_json:
        _check_as_json(preset, overrides, from_verl, with_data=data)
        return
    request = read_request(preset, overrides, from_verl)
    config, found = request.resolved(), request.examination
    typer.echo(report.as_text(config, found.notices, found.source, show_all=show_all))
    if request.script is not None:
        from flows.command.run_request import script_lines

        typer.echo("\n".join(script_lines(request.script)))
    if data:
        lines = checked_data(config).lines()
        typer.echo("\n".join(["", "data:", *(f"  {line}" for line in lines)]))


def schema() -> None:
    """Print the JSON Schema of presets, for editors."""
    from rlcore.config.schema import json_schema

    print_json(json_schema())


def doctor(
    runs_root: RunsRoot = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Look at this machine: versions, cores, memory, servers, leftovers; each finding has a fix."""
    from rlcore.doctor import examine_machine

    findings = examine_machine(runs_root, os.environ)
    if as_json:
        print_json({"findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            typer.echo(str(finding))
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(REFUSED)


def check_env(
    preset: Preset,
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option(min=1, help="Training prompts to try.")] = 2,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions of each.")] = 2,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Who writes in the model's place: random, calls or FILE.py:FUNCTION.",
            show_default="calls where there are tools, else random",
        ),
    ] = None,
) -> None:
    """Try a preset's sessions, tools and rewards without the model: what the trainer would see."""
    from flows.command.check_env import show_environment
    from rlcore.config import resolve_config

    resolved = resolve_config(preset, overrides or [])
    tell_notices(resolved.notices)
    show_environment(resolved.config, prompts=prompts, sessions=sessions, policy=policy)


def _check_as_json(
    preset: str | None, overrides: list[str] | None, from_verl: str | None, *, with_data: bool
) -> None:
    """Print what `check` finds; whatever is wrong is in `problems`, in the same words."""
    from flows.command.run_request import read_request
    from rlcore.config import report

    told: dict[str, Any] = {"ok": False, "source": from_verl or preset, "problems": []}
    try:
        request = read_request(preset, overrides, from_verl)
    except ConfigError as error:
        told["problems"] = [_as_problem("--from-verl" if from_verl else "PRESET", error)]
        print_json(told)
        raise typer.Exit(REFUSED) from None
    found, script = request.examination, request.script
    told |= {
        "source": found.source,
        "problems": [dataclasses.asdict(problem) for problem in found.problems],
    }
    if found.config is not None and not found.problems:
        told |= report.as_json(found.config, found.notices, found.source) | {"data": None}
        try:
            if with_data:
                told["data"] = dataclasses.asdict(checked_data(found.config))
        except (ConfigError, DataError) as error:
            told |= {"ok": False, "problems": [_as_problem("data", error)]}
    if script is not None:
        classes = ("honoured", "satisfied", "refused")
        told["script"] = {name: list(getattr(script, name)) for name in classes}
    print_json(told)
    if not told["ok"]:
        raise typer.Exit(REFUSED)


def _as_problem(path: str, error: ConfigError | DataError) -> dict[str, Any]:
    """Return an error, which says in its text what to do, as one of the list."""
    return dataclasses.asdict(Problem(path=path, has_value=False, reason=str(error), fix=""))
