"""What the commands share: arguments, exit codes, and how results and errors are told."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from pydantic_core import to_json

from flows.command.embedded_server import start_embedded_server
from flows.command.environment import (
    foreign_databases,
    prefect_api_url,
    prefect_home,
    prepare_prefect_environment,
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


def prepare_prefect(runs_root: str) -> None:
    """Choose the Prefect server of this process; tell what the environment says in vain."""
    if prefect_api_url() is None:
        tell_notices(
            [
                f"{name} is for a server of yours; runs without PREFECT_API_URL are recorded in "
                f"{prefect_home(runs_root)}"
                for name in foreign_databases(runs_root)
            ]
        )
    prepare_prefect_environment(runs_root)


def run_flow(flow: Callable[..., Any], **parameters: Any) -> Any:
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


def checked_data(config: Any) -> Any:
    """Check registered names and data, which needs torch and transformers."""
    from rlcore.data.check import check_data
    from rlcore.trainer.registered import check_registered

    check_registered(config)
    return check_data(config)


def tell_summary(summary: Any, runs_root: str) -> None:
    """Print what a run came to, and where Prefect shows it; nothing for one that was skipped."""
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


def tell_notices(notices: list[str]) -> None:
    """Print what a configuration is told though it is accepted."""
    for notice in notices:
        typer.echo(f"note: {notice}")


def _tell_error(error: Exception) -> None:
    typer.secho("error: ", fg=typer.colors.RED, err=True, nl=False)
    typer.echo("\n".join([str(error), *attempt_of(error)]), err=True)


def print_json(content: dict[str, Any]) -> None:
    """Print an answer for programs."""
    # Presets may hold what JSON has no word for: a date, an infinite number.
    text = to_json(content, indent=2, inf_nan_mode="strings", fallback=str)
    typer.echo(text.decode())
