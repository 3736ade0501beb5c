"""The `rollflow` command. Flows, torch and Prefect are imported inside the commands that need them.

Exit codes: 0 done (`check`: it can be run; `doctor`: nothing prevents a run); 1 the run failed;
2 what was asked for cannot be done, found before a run began (one message, no traceback;
`doctor`: a finding prevents runs); 130 interrupted.
"""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flows.command.check import check, check_env, doctor, schema
from flows.command.command_line import (
    EXIT_CODES,
    FromVerl,
    MaybePreset,
    Overrides,
    Preset,
    RunsRoot,
    checked_data,
    prepare_prefect,
    run_flow,
    tell_notices,
    tell_summary,
    told_clearly,
)
from flows.command.deploy import deploy, serve
from flows.command.environment import (
    LOOPBACK,
    prefect_api_url,
    prefect_home,
    ui_environment,
)
from flows.command.runs import export, rollback, runs, stop, timeline
from rlcore.errors import ConfigError

app = typer.Typer(
    help="Post-train language models with reinforcement learning, as a Prefect workflow on Ray.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # brackets in help are lists, not markup
)


@app.command(epilog=EXIT_CODES)
def train(
    preset: MaybePreset = None, overrides: Overrides = None, from_verl: FromVerl = None
) -> None:
    """Train: check everything, then run. Prints where the results are."""
    with told_clearly():
        from flows.command.run_request import read_request

        request = read_request(preset, overrides, from_verl)
        config = request.resolved()
        values = request.values()
        tell_notices(request.examination.notices)
        for line in checked_data(config).lines():
            typer.echo(line)
        runs_root = config.trainer.runs_root
        prepare_prefect(runs_root)
        from flows.train import train as train_flow

        if from_verl is not None:
            # Checked above; the typed form of `config` lacks the keys that are only satisfied.
            train_flow = train_flow.with_options(validate_parameters=False)
        summary = run_flow(
            train_flow, preset=request.preset, overrides=values, config=request.config
        )
        tell_summary(summary, runs_root)


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
        checked_data(resolved.config)
        runs_root = resolved.config.trainer.runs_root
        prepare_prefect(runs_root)
        from flows.evaluate_policy import evaluate_policy

        summary = run_flow(evaluate_policy, model=model, preset=preset, overrides=values)
        tell_summary(summary, runs_root)


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
        tell_notices(resolved.notices)
        prepare_prefect(resolved.config.trainer.runs_root)
        from flows.train import train as train_flow

        summary = run_flow(
            train_flow,
            preset=request["preset"],
            overrides=values,
            config=request["config"],
            resume=folder.run_id,
        )
        tell_summary(summary, resolved.config.trainer.runs_root)


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


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


for command in (check, doctor):
    app.command(epilog=EXIT_CODES)(told_clearly()(command))
app.command("check-env")(told_clearly()(check_env))
for command in (schema, deploy, serve, runs, timeline, export, stop, rollback):
    app.command()(told_clearly()(command))


if __name__ == "__main__":
    main()
