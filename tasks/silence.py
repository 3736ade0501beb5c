"""Whether a training whose heartbeats stopped is dead, or was only not heard.

A Prefect server that was away for longer than some beats takes every run for silent when it comes
back. So nothing is called dead before this has looked, in this order, until one of them says it:

    the flow run has ended                                not dead
    it beats again                                        not dead
    its attempt has not ended, and nothing holds the      dead: the kernel lets go of the lock of a
    run folder, which can be seen from here               process that dies
    PATIENCE_S are over, and a process holds the folder   not dead: it lives and is not heard
    PATIENCE_S are over                                   dead: a host whose folder is not seen here
"""

import asyncio
import logging
import time
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.events.filters import (
    EventFilter,
    EventNameFilter,
    EventOccurredFilter,
    EventResourceFilter,
)

from rlcore.config import load_config
from rlcore.config.trainer import TrainerConfig
from rlcore.errors import ConfigError
from rlcore.trainer.run_folder import is_held
from tasks.attempts import runs_in

logger = logging.getLogger(__name__)

PATIENCE_S = 120.0
"""Four beats (PREFECT_FLOWS_HEARTBEAT_FREQUENCY of prefect.yaml)."""
POLL_S = 2.0


async def why_not_dead(
    client: PrefectClient,
    flow_run_id: str,
    *,
    patience_s: float = PATIENCE_S,
    poll_s: float = POLL_S,
) -> str | None:
    """Return what shows that the process of a training flow run lives or has ended; None: dead."""
    began, ends = datetime.now(UTC), time.monotonic() + patience_s
    trainer: TrainerConfig | None = None
    flow_run = await client.read_flow_run(UUID(flow_run_id))
    try:
        trainer = _config(flow_run)
    except ConfigError as error:
        # Such as a preset that has changed since: its folder is not known, its beats still are.
        logger.warning("flow run %s: its folder is not known: %s", flow_run.name, error)
    while True:
        flow_run = await client.read_flow_run(UUID(flow_run_id))
        if flow_run.state is None or not flow_run.state.is_running():
            return f"it is {flow_run.state.name if flow_run.state else 'without a state'}"
        if await _beats_since(client, flow_run_id, began):
            return "it beats again"
        lives = _holds_its_folder(flow_run, trainer) if trainer else None
        if lives is False:
            return None
        if time.monotonic() >= ends:
            return "no beat is heard, but a process holds its run folder" if lives else None
        await asyncio.sleep(poll_s)


async def _beats_since(client: PrefectClient, flow_run_id: str, since: datetime) -> bool:
    wanted = EventFilter(
        occurred=EventOccurredFilter.model_validate({"since": since}),
        event=EventNameFilter(name=["prefect.flow-run.heartbeat"]),
        resource=EventResourceFilter(id=[f"prefect.flow-run.{flow_run_id}"]),
    )
    return bool((await client.read_events(wanted, limit=1)).events)


def _config(flow_run: FlowRun) -> TrainerConfig:
    parameters = flow_run.parameters
    return load_config(
        parameters["preset"], parameters.get("overrides") or {}, parameters.get("config")
    ).trainer


def _holds_its_folder(flow_run: FlowRun, trainer: TrainerConfig) -> bool | None:
    """Say whether a process holds the folder of a flow run whose attempt has no end.

    None: the folder is not seen here, or the attempt has an end.
    """
    for folder, record in runs_in(Path(trainer.runs_root), trainer.default_local_dir):
        newest = record["attempts"][-1] if record["attempts"] else {}
        if newest.get("flow_run_id") == str(flow_run.id):
            return is_held(folder) if newest.get("outcome") is None else None
    return None
