"""`rollflow runs`, `export`, `stop` and `rollback`: what is done to runs from outside."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from flows.command.environment import prefect_api_url
from rlcore.errors import CheckpointError

RunsRoot = Annotated[str, typer.Option(help="Folder of the runs (trainer.runs_root).")]
Run = Annotated[str, typer.Argument(help="Run id below --runs-root, or path of a run folder.")]


def runs(
    compare: Annotated[
        list[str] | None,
        typer.Argument(help="Two runs to compare; none: list all.", show_default=False),
    ] = None,
    runs_root: RunsRoot = "runs",
) -> None:
    """List the runs, or compare configuration and curves of two."""
    from rlcore.tracking import overview

    if not compare:
        for line in overview.listed(Path(runs_root)):
            typer.echo(line)
        return
    if len(compare) != 2:
        raise CheckpointError(f"two runs are compared, not {len(compare)}: {', '.join(compare)}")
    first, second = (_folder(run, runs_root) for run in compare)
    for line in overview.compared(first, second):
        typer.echo(line)


def export(
    run: Run,
    out: Annotated[Path, typer.Option(help="Folder to write, which must not exist.")],
    step: Annotated[
        int | None, typer.Option(help="Checkpoint of this step; default: the exported model.")
    ] = None,
    runs_root: RunsRoot = "runs",
) -> None:
    """Copy a run's trained model, or that of a checkpoint, as a Hugging Face folder."""
    from rlcore.training.export import export_model

    typer.echo(f"model: {export_model(_folder(run, runs_root), out, step=step)}")


def stop(
    run: Run,
    runs_root: RunsRoot = "runs",
) -> None:
    """Stop a run from outside, as a cancel; `rollflow resume` continues it."""
    from tasks.stopping import stop_run

    folder = _folder(run, runs_root)
    typer.echo(asyncio.run(stop_run(folder, has_server=prefect_api_url() is not None)))


def rollback(
    store: Annotated[str, typer.Option(help="Folder or URL of promoted models.")] = "promoted",
) -> None:
    """Make the model that was promoted before the current one current again."""
    from rlcore.retraining.promotion import PromotedStore

    now = PromotedStore(store).rollback()
    typer.echo(f"{now.candidate} is current in {store} again")


def _folder(run: str, runs_root: str) -> Path:
    for path in (Path(run), Path(runs_root) / run):
        if (path / "run.json").is_file():
            return path
    known = sorted(file.parent.name for file in Path(runs_root).glob("*/run.json"))
    raise CheckpointError(
        f"{run}: there is no such run in {runs_root}; runs there: {', '.join(known) or 'none'}"
    )
