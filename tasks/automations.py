"""Automations as files: `deployments/automations/*.yaml`, applied by name.

The form is Prefect's, but that an action names its deployment (`deployment: continue-run/on-crash`)
instead of its id, which differs from server to server.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import PrefectClient
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound
from pydantic import ValidationError

from rlcore.errors import ConfigError

FOLDER = Path("deployments") / "automations"


@dataclass(frozen=True, kw_only=True, slots=True)
class AutomationFile:
    """One automation and the file it came from."""

    path: Path
    content: dict[str, Any]

    @property
    def name(self) -> str:
        """Return the name by which it is found again."""
        return str(self.content["name"])

    @property
    def deployments(self) -> list[str]:
        """Return the deployments that its actions start, as `flow/name`."""
        return [action["deployment"] for action in self.content["actions"] if _names_one(action)]

    def resolved(self, deployment_ids: dict[str, str]) -> AutomationCore:
        """Return it as Prefect takes it.

        Args:
            deployment_ids: `flow/name` to id.

        Raises:
            ConfigError: Prefect does not take it; names the file and the key.
        """
        actions = [_with_id(action, deployment_ids) for action in self.content["actions"]]
        try:
            return AutomationCore.model_validate({**self.content, "actions": actions})
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{self.path}: {where}: {first['msg']}") from error


def read_automations(folder: Path = FOLDER) -> list[AutomationFile]:
    """Return all automations of a folder, sorted by file name.

    Raises:
        ConfigError: a file cannot be read, or two have the same name.
    """
    found: dict[str, AutomationFile] = {}
    for path in sorted(folder.glob("*.yaml")):
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        missing = {"name", "trigger", "actions"} - set(content or {})
        if missing:
            raise ConfigError(f"{path}: it has no {', '.join(sorted(missing))}")
        file = AutomationFile(path=path, content=content)
        if file.name in found:
            raise ConfigError(f"{path} and {found[file.name].path} are both named {file.name!r}")
        found[file.name] = file
    return list(found.values())


async def apply_automations(client: PrefectClient, files: list[AutomationFile]) -> list[str]:
    """Create or replace the automations on the server; return a line about each.

    Raises:
        ConfigError: an action names a deployment that the server does not have.
    """
    lines = []
    for file in files:
        ids = {name: await _deployment_id(client, file, name) for name in file.deployments}
        automation = file.resolved(ids)
        existing = await client.read_automations_by_name(file.name)
        if existing:
            await client.update_automation(existing[0].id, automation)
        else:
            await client.create_automation(automation)
        lines.append(f"{'replaced' if existing else 'created'}: {file.name} ({file.path})")
    return lines


async def _deployment_id(client: PrefectClient, file: AutomationFile, name: str) -> str:
    try:
        return str((await client.read_deployment_by_name(name)).id)
    except ObjectNotFound:
        raise ConfigError(
            f"{file.path}: the server has no deployment {name}; deploy first (`rollflow deploy`)"
        ) from None


def _names_one(action: dict[str, Any]) -> bool:
    return "deployment" in action


def _with_id(action: dict[str, Any], deployment_ids: dict[str, str]) -> dict[str, Any]:
    if not _names_one(action):
        return action
    rest = {key: value for key, value in action.items() if key != "deployment"}
    return {**rest, "source": "selected", "deployment_id": deployment_ids[action["deployment"]]}
