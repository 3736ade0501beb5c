"""A new attempt for a crashed one: what is continued, and how a second start is prevented."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound

from rlcore.config import load_config
from tasks.attempts import CONTINUABLE, runs_in


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """A run whose newest attempt crashed."""

    flow_run_id: str
    """Of that attempt."""
    deployment_id: UUID
    parameters: dict[str, Any]
    """Of that attempt."""
    run_id: str
    attempts: int
    max_attempts: int


async def find_continuation(client: PrefectClient, flow_run_id: str) -> Continuation | str:
    """Return what continues a flow run, or why nothing does."""
    try:
        flow_run = await client.read_flow_run(UUID(flow_run_id))
    except ObjectNotFound:
        return f"there is no flow run {flow_run_id}"
    if flow_run.state is None or not flow_run.state.is_crashed():
        name = flow_run.state.name if flow_run.state else "no state"
        return f"flow run {flow_run.name} is {name}, not Crashed"
    if flow_run.deployment_id is None:
        return f"flow run {flow_run.name} is no deployment's: `rollflow resume` continues its run"
    parameters = dict(flow_run.parameters)
    config = load_config(
        parameters["preset"], parameters.get("overrides") or {}, parameters.get("config")
    ).trainer
    for _, record in runs_in(Path(config.runs_root), config.default_local_dir):
        attempts = record["attempts"]
        if not any(attempt.get("flow_run_id") == flow_run_id for attempt in attempts):
            continue
        newest = attempts[-1]
        if newest.get("flow_run_id") != flow_run_id:
            return f"run {record['run_id']} went on already, with attempt {len(attempts)}"
        if newest.get("outcome") not in CONTINUABLE:
            return f"the attempt of run {record['run_id']} is {newest['outcome']}"
        return Continuation(
            flow_run_id=flow_run_id,
            deployment_id=flow_run.deployment_id,
            parameters=parameters,
            run_id=str(record["run_id"]),
            attempts=len(attempts),
            max_attempts=config.max_attempts,
        )
    return f"flow run {flow_run.name} crashed before its run began; start it anew"


async def continue_attempt(client: PrefectClient, found: Continuation) -> FlowRun:
    """Start the next attempt; asked twice, the same flow run is returned."""
    return await client.create_flow_run_from_deployment(
        found.deployment_id,
        parameters={**found.parameters, "resume": found.run_id},
        name=f"{found.run_id}-attempt-{found.attempts + 1}",
        idempotency_key=f"continue-{found.flow_run_id}",
    )
