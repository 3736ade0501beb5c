"""prefect.yaml read by us: for `rollflow serve`, which needs no worker, and for tests."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.deployments.runner import RunnerDeployment
from prefect.events import DeploymentTriggerTypes
from prefect.exceptions import ObjectNotFound
from prefect.flows import Flow, load_flow_from_entrypoint
from prefect.types.entrypoint import EntrypointType
from pydantic import TypeAdapter

from rlcore.errors import ConfigError

FILE = Path("prefect.yaml")
WORK_POOLS = Path("deployments") / "work_pools.yaml"

_TRIGGERS: TypeAdapter[list[Any]] = TypeAdapter(list[DeploymentTriggerTypes])


def read_deployments(file: Path = FILE) -> list[dict[str, Any]]:
    """Return the deployments of prefect.yaml.

    Raises:
        ConfigError: there is no such file, or it has none.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{file} cannot be read: {error}; start the command in the project's folder"
        ) from error
    if not isinstance(content, dict) or not content.get("deployments"):
        raise ConfigError(f"{file} has no deployments")
    return cast("list[dict[str, Any]]", content["deployments"])


def load_flow(entry: dict[str, Any]) -> Flow[..., Any]:
    """Return the flow of a deployment; its imports have to work here."""
    return load_flow_from_entrypoint(entry["entrypoint"], use_placeholder_flow=False)


async def served_deployments(entries: Sequence[dict[str, Any]]) -> list[RunnerDeployment]:
    """Return the deployments as this process serves them: no pools, the rest as in the file."""
    served: list[RunnerDeployment] = []
    for entry in entries:
        # Prefect calls it a coroutine or not by where it is called from.
        made: Any = load_flow(entry).to_deployment(
            name=entry["name"],
            parameters=entry.get("parameters") or {},
            schedules=entry.get("schedules"),
            triggers=_TRIGGERS.validate_python(_named_triggers(entry)),
            description=entry.get("description"),
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
        served.append(await made if inspect.isawaitable(made) else made)
    return served


def _named_triggers(entry: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": entry["name"], **trigger} for trigger in entry.get("triggers") or []]


def read_work_pools(file: Path = WORK_POOLS) -> list[dict[str, Any]]:
    """Return the work pools of a file.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


async def apply_work_pools(client: PrefectClient, file: Path = WORK_POOLS) -> list[str]:
    """Make the work pools that are not there, and set the limits of all; return a line of each.

    Raises:
        ConfigError: the file cannot be read.
    """
    lines = []
    for pool in read_work_pools(file):
        name, limit = pool["name"], pool["concurrency_limit"]
        try:
            await client.read_work_pool(name)
        except ObjectNotFound:
            await client.create_work_pool(
                WorkPoolCreate(
                    name=name,
                    type=pool["type"],
                    description=pool["description"],
                    concurrency_limit=limit,
                )
            )
            lines.append(f"created: work pool {name}, limit {limit or 'none'}")
        else:
            await client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=limit))
            lines.append(f"kept: work pool {name}, limit {limit or 'none'}")
    return lines
