"""`rollflow deploy` and `rollflow serve`: prefect.yaml on a server, or served from here."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from flows.command.embedded_server import start_full_server
from flows.command.environment import (
    deploy_environment,
    prefect_api_url,
    prepare_served_environment,
)
from rlcore.errors import ConfigError

RunsRoot = Annotated[str, typer.Option(help="Folder of the runs (trainer.runs_root).")]


def deploy() -> None:
    """Put work pools, deployments and automations on the server that PREFECT_API_URL names."""
    if prefect_api_url() is None:
        raise ConfigError(
            "PREFECT_API_URL is not set, and deployments need a server that stays: set it, or use "
            "`rollflow serve`, which starts one"
        )
    asyncio.run(_work_pools())
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"]
    if subprocess.run(command, env=deploy_environment(Path.cwd()), check=False).returncode:
        raise ConfigError("`prefect deploy --all` failed; its message is above")
    asyncio.run(_automations())


def serve(
    runs_root: RunsRoot = "runs",
    port: Annotated[int, typer.Option(help="Port of the server, if one is started.")] = 4200,
) -> None:
    """Serve all deployments from this process, without workers; Ctrl-C ends it.

    Starts a Prefect server with UI over the embedded database, unless PREFECT_API_URL names one.
    """
    url = prefect_api_url()
    if url is None:
        url = start_full_server(runs_root, port)
    prepare_served_environment(url)
    typer.echo(f"serving the deployments of prefect.yaml; UI: {url.removesuffix('/api')}")
    sys.stdout.flush()
    # In a process image of its own: Prefect reads its settings when it is imported.
    os.execv(sys.executable, [sys.executable, "-m", "flows.command.deploy"])


async def _work_pools() -> None:
    from prefect.client.orchestration import get_client

    from tasks.deployments import apply_work_pools

    async with get_client() as client:
        _tell(await apply_work_pools(client))


async def _automations() -> None:
    from prefect.client.orchestration import get_client

    from tasks.automations import apply_automations, read_automations

    async with get_client() as client:
        _tell(await apply_automations(client, read_automations()))


async def _serve() -> None:
    from prefect.runner import Runner

    from tasks.deployments import read_deployments, served_deployments

    runner: Any = Runner(pause_on_shutdown=True, limit=None)
    for deployment in await served_deployments(read_deployments()):
        await runner.add_deployment(deployment)
        typer.echo(f"served: {deployment.flow_name}/{deployment.name}")
    await _automations()
    sys.stdout.flush()
    await runner.start()


def _tell(lines: list[str]) -> None:
    for line in lines:
        typer.echo(line)


if __name__ == "__main__":
    asyncio.run(_serve())
