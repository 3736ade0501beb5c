"""The `rollflow` command. Flows, torch and Prefect are imported inside the commands that need them.

Exit codes: 0 done (`check`: it can be run; `doctor`: nothing prevents a run); 1 the run failed;
2 what was asked for cannot be done, found before a run began (one message, no traceback;
`doctor`: a finding prevents runs); 130 interrupted.
"""

import asyncio
import dataclasses
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.commands_deploy import deploy, serve
from flows.commands_runs import export, rollback, runs, stop
from flows.embedded_server import start_embedded_server
from flows.environment import (
    LOOPBACK,
    prefect_api_url,
    prefect_home,
    prepare_prefect_environment,
    ui_environment,
)
from rlcore.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeviceLockError,
    RLCoreError,
    attempt_of,
)

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
REFUSALS = (ConfigError, DataError, DeviceLockError, CheckpointError)

app = typer.Typer(
    help="Post-train language models with reinforcement learning, as a Prefect workflow on Ray.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # brackets in help are lists, not markup
)

EXIT_CODES = (
    "Exit codes: 0 done; 1 the run failed; 2 it cannot be run as asked, every problem is listed; "
    "130 interrupted."
)

Preset = Annotated[
    str,
    typer.Argument(
        help="Name of a preset in deployments/runs (grpo-tiny), or path of a YAML file.",
        show_default=False,
    ),
]
MaybePreset = Annotated[
    str | None,
    typer.Argument(
        metavar="PRESET",
        help="Name of a preset in deployments/runs (grpo-tiny), or path of a YAML file.",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="verl's keys, as for Hydra: data.train_batch_size=16 trainer.logger=[console]",
        show_default=False,
    ),
]
FromVerl = Annotated[
    str | None,
    typer.Option(
        "--from-verl",
        metavar="SCRIPT",
        help="Instead of a preset: 'python3 -m verl.trainer.main_ppo key=value …', its overrides "
        "alone, or the path of such a script.",
        show_default=False,
    ),
]
RunsRoot = Annotated[str, typer.Option(help="Folder of the runs (trainer.runs_root).")]


@app.command(epilog=EXIT_CODES)
def train(
    preset: MaybePreset = None, overrides: Overrides = None, from_verl: FromVerl = None
) -> None:
    """Train: check everything, then run. Prints where the results are."""
    with told_clearly():
        from flows.requests import read_request

        request = read_request(preset, overrides, from_verl)
        config = request.resolved()
        values = request.values()
        _tell_notices(request.examination.notices)
        for line in _checked_data(config).lines():
            typer.echo(line)
        runs_root = config.trainer.runs_root
        prepare_prefect_environment(runs_root)
        from flows.train import train as train_flow

        if from_verl is not None:
            # Checked above; the typed form of `config` lacks the keys that are only satisfied.
            train_flow = train_flow.with_options(validate_parameters=False)
        summary = _run(train_flow, preset=request.preset, overrides=values, config=request.config)
        _tell_summary(summary, runs_root)


@app.command(epilog=EXIT_CODES)
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
    with told_clearly():
        from flows.requests import read_request
        from rlcore.config import report

        request = read_request(preset, overrides, from_verl)
        if as_json:
            _check_as_json(request, with_data=data)
            return
        config, found = request.resolved(), request.examination
        typer.echo(report.as_text(config, found.notices, found.source, show_all=show_all))
        if request.script is not None:
            from flows.requests import script_lines

            typer.echo("\n".join(script_lines(request.script)))
        if data:
            lines = _checked_data(config).lines()
            typer.echo("\n".join(["", "data:", *(f"  {line}" for line in lines)]))


@app.command()
def schema() -> None:
    """Print the JSON Schema of presets, for editors."""
    with told_clearly():
        from rlcore.config.schema import json_schema

        _print_json(json_schema())


@app.command(epilog=EXIT_CODES)
def doctor(
    runs_root: RunsRoot = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Look at this machine: versions, cores, memory, servers, leftovers; each finding has a fix."""
    with told_clearly():
        from rlcore.doctor import examine_machine

        findings = examine_machine(runs_root, os.environ)
        if as_json:
            _print_json({"findings": [dataclasses.asdict(finding) for finding in findings]})
        else:
            for finding in findings:
                typer.echo(str(finding))
        if any(finding.level == "error" for finding in findings):
            raise typer.Exit(REFUSED)


@app.command("check-env")
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
    with told_clearly():
        from flows.check_env import show_environment
        from rlcore.config import resolve_config

        resolved = resolve_config(preset, overrides or [])
        _tell_notices(resolved.notices)
        show_environment(resolved.config, prompts=prompts, sessions=sessions, policy=policy)


@app.command()
def prepare(
    name: Annotated[
        str,
        typer.Argument(
            help="smollm2, tiny, questions (of a CSV or JSON lines file), textarena (episodes of a "
            "game), or a reasoning-gym task.",
            show_default=False,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="out=FOLDER; for tasks also size=, test_size=, seed=, level= and the task's own "
            "settings; for questions file=, question=, answer=, data_source=, extraction=, "
            "system=, test_size=, seed=; for textarena game=, size=, test_size=, seed=, system= "
            "and the game's own settings; for all model=FOLDER, whose tokens are counted.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make a model folder or a data set, once: a complete one is left as it is."""
    with told_clearly():
        from rlcore.config.overrides import overrides_as_dict

        values = overrides_as_dict(overrides or [])
        out = values.pop("out", None)
        from rlcore.data.prepare import prepare_named, read_report

        for folder in prepare_named(name, None if out is None else str(out), values):
            typer.echo(f"ready: {folder}")
            report = read_report(folder)
            for line in report.lines() if report else []:
                typer.echo(line)


@app.command()
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_MODEL",
            help="Id of a run with an exported model, or a Hugging Face folder.",
            show_default=False,
        ),
    ],
    preset: Preset,
    overrides: Overrides = None,
) -> None:
    """Measure a model on a preset's held-out prompts."""
    with told_clearly():
        from rlcore.config import resolve_config
        from rlcore.config.overrides import overrides_as_dict

        resolved = resolve_config(preset, overrides or [])
        values = overrides_as_dict(overrides or [])
        _checked_data(resolved.config)
        runs_root = resolved.config.trainer.runs_root
        prepare_prefect_environment(runs_root)
        from flows.evaluate_policy import evaluate_policy

        summary = _run(evaluate_policy, model=model, preset=preset, overrides=values)
        _tell_summary(summary, runs_root)


@app.command()
def resume(
    run: Annotated[
        str,
        typer.Argument(help="Run id below --runs-root, or path of a run folder."),
    ],
    overrides: Overrides = None,
    runs_root: RunsRoot = "runs",
) -> None:
    """Continue a run from its last checkpoint, as a new attempt of the same run."""
    with told_clearly():
        from rlcore.config import resolve_config
        from rlcore.config.overrides import overrides_as_dict
        from rlcore.trainer.run_folder import RunFolder

        path = Path(run) if (Path(run) / "run.json").is_file() else Path(runs_root) / run
        folder = RunFolder.open(path)
        request = folder.record()["request"]
        values = {**folder.last_overrides(), **overrides_as_dict(overrides or [])}
        resolved = resolve_config(request["preset"], values, request["config"])
        meant = resolved.config.run_folder(folder.run_id)
        if meant.resolve() != folder.path:
            raise ConfigError(
                f"run {folder.run_id} lies in {folder.path}, but its configuration means "
                f"{meant.resolve()}; start the command in the folder the run was started in"
            )
        _tell_notices(resolved.notices)
        prepare_prefect_environment(resolved.config.trainer.runs_root)
        from flows.train import train as train_flow

        summary = _run(
            train_flow,
            preset=request["preset"],
            overrides=values,
            config=request["config"],
            resume=folder.run_id,
        )
        _tell_summary(summary, resolved.config.trainer.runs_root)


@app.command()
def ui(
    runs_root: RunsRoot = "runs",
    port: Annotated[int, typer.Option(help="Port on the loopback address.")] = 4200,
) -> None:
    """Open the Prefect UI over the embedded database of the runs; Ctrl-C ends it."""
    with told_clearly():
        home = prefect_home(runs_root)
        if not (home / "prefect.db").is_file():
            raise ConfigError(f"no run has been recorded in {home}; see --runs-root")
        if not _is_free(port):
            raise ConfigError(f"port {port} is taken; choose another with --port")
        url = prefect_api_url()
        if url is not None:
            typer.echo(f"PREFECT_API_URL is set: new runs are recorded at {url}, not here.")
        typer.echo(f"Prefect UI of {home}: http://{LOOPBACK}:{port}")
        sys.stdout.flush()
        command = [sys.executable, "-m", "prefect", "server", "start"]
        command += ["--host", LOOPBACK, "--port", str(port)]
        os.execve(sys.executable, command, ui_environment(runs_root, port))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    app(args=None if arguments is None else list(arguments), prog_name="rollflow")


@contextmanager
def told_clearly() -> Iterator[None]:
    """Turn errors that a user can act on into one message and an exit code."""
    try:
        yield
    except RLCoreError as error:
        _tell_error(error)
        asks_too_much = isinstance(error, REFUSALS) and not attempt_of(error)
        raise typer.Exit(REFUSED if asks_too_much else FAILED) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        typer.secho("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _run(flow: Callable[..., Any], **parameters: Any) -> Any:
    """Run a flow to its end; Prefect's own verdicts become exit codes."""
    from prefect.exceptions import CancelledRun, CrashedRun, FailedRun, Pause, TerminationSignal

    if prefect_api_url() is None:
        start_embedded_server()
    _keep_flow_errors_off_the_console()
    try:
        return asyncio.run(flow(**parameters))
    except (CancelledRun, TerminationSignal):
        typer.secho("cancelled", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except Pause:
        typer.secho("suspended; `rollflow resume` continues it", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except (CrashedRun, FailedRun) as error:
        _tell_error(error)
        raise typer.Exit(FAILED) from None


def _keep_flow_errors_off_the_console() -> None:
    """Let the one message of `told_clearly` stand alone; the UI has Prefect's, with traceback."""
    import prefect.main  # noqa: F401  sets Prefect's logging up
    from prefect.logging.handlers import PrefectConsoleHandler

    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            handler.addFilter(lambda record: record.name != "prefect.flow_runs")


def _checked_data(config: Any) -> Any:
    """Check registered names and data, which needs torch and transformers."""
    from rlcore.data.check import check_data
    from rlcore.trainer.registered import check_registered

    check_registered(config)
    return check_data(config)


def _check_as_json(request: Any, *, with_data: bool) -> None:
    from rlcore.config import report

    found, script = request.examination, request.script
    told: dict[str, Any] = {
        "ok": False,
        "source": found.source,
        "problems": [dataclasses.asdict(problem) for problem in found.problems],
    }
    if not found.problems:
        told = report.as_json(found.config, found.notices, found.source)
    if script is not None:
        classes = ("honoured", "satisfied", "refused")
        told["script"] = {name: list(getattr(script, name)) for name in classes}
    if told["ok"]:
        told["data"] = None
        try:
            if with_data:
                told["data"] = dataclasses.asdict(_checked_data(found.config))
        except (ConfigError, DataError) as error:
            problem = {"path": "data", "reason": str(error)}
            told = {"ok": False, "source": found.source, "problems": [problem]}
    _print_json(told)
    if not told["ok"]:
        raise typer.Exit(REFUSED)


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _tell_summary(summary: Any, runs_root: str) -> None:
    if not isinstance(summary, dict):
        return
    typer.echo("")
    for name, value in summary.items():
        label = name.replace("_", " ")
        if isinstance(value, dict) and {"mean", "stderr", "n"} <= value.keys():
            value = f"{value['mean']:.3f} ± {value['stderr']:.3f} (n={value['n']})"
        for item in value if isinstance(value, list) else [value]:
            typer.echo(f"{label:16}{item}")
            label = ""
    url = prefect_api_url()
    where = url.removesuffix("/api") if url else f"rollflow ui --runs-root {runs_root}"
    typer.echo(f"{'Prefect UI':16}{where}")


def _tell_notices(notices: list[str]) -> None:
    for notice in notices:
        typer.echo(f"note: {notice}")


def _tell_error(error: Exception) -> None:
    typer.secho("error: ", fg=typer.colors.RED, err=True, nl=False)
    typer.echo("\n".join([str(error), *attempt_of(error)]), err=True)


def _print_json(content: dict[str, Any]) -> None:
    typer.echo(json.dumps(content, indent=2))


for command in (deploy, serve, runs, export, stop, rollback):
    app.command()(told_clearly()(command))


if __name__ == "__main__":
    main()
