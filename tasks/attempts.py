"""Which flow run this is, and which training run it is an attempt of.

A flow run that Prefect starts again (Retry in the UI, Resume after Suspend, a worker that
reschedules it) has the parameters of its first start and a higher run count. Its run is found by
the flow run's id, which every attempt leaves in run.json, and continued from its checkpoint.
"""

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect import Flow, Task
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.context import FlowRunContext

from rlcore.config import RunConfig

logger = logging.getLogger(__name__)

STATE_S = 5.0
"""For the server to say why a run was ended; it is freed without an answer, too."""

PAGES_PER_START = 1_000_000
"""Call indexes that one start of a flow run may use."""

CONTINUABLE = ("crashed", "terminated", "suspended", None)
"""Outcomes of attempts that a new attempt may continue unasked; None: the process was killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowIdentity:
    """The flow run that this process executes."""

    flow_run_id: str | None
    """None outside a flow."""
    run_count: int
    """How often Prefect has started it, this time included."""
    deployment_id: str | None


def this_flow_run() -> FlowIdentity:
    """Return the identity of the flow run that the caller is in."""
    context = FlowRunContext.get()
    flow_run = context.flow_run if context is not None else None
    if flow_run is None:
        return FlowIdentity(flow_run_id=None, run_count=1, deployment_id=None)
    return FlowIdentity(
        flow_run_id=str(flow_run.id),
        run_count=flow_run.run_count,
        deployment_id=str(flow_run.deployment_id) if flow_run.deployment_id else None,
    )


def runs_in(root: Path, local: str | None = None) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield folder and run.json of every run below `root`, and of the one in `local`, if any.

    A file that another process is just replacing is read whole; one that is broken is logged and
    left out.
    """
    records = sorted(root.glob("*/run.json")) if root.is_dir() else []
    if local is not None and (Path(local) / "run.json").is_file():
        records.append(Path(local) / "run.json")
    for file in records:
        try:
            yield file.parent, json.loads(file.read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            logger.warning("%s cannot be read: %s", file, error)


def run_of_flow_run(config: RunConfig, flow_run_id: str) -> str | None:
    """Return the id of the run that has an attempt by flow run `flow_run_id`, or None."""
    trainer = config.trainer
    for _, record in runs_in(Path(trainer.runs_root), trainer.default_local_dir):
        if any(attempt.get("flow_run_id") == flow_run_id for attempt in record["attempts"]):
            return str(record["run_id"])
    return None


def keep_earlier_pages(flows: Sequence[Flow[..., Any]]) -> None:
    """Let a flow run that is started again open pages of its own.

    Prefect knows a subflow by its call index in the parent. From 0 again, the page of step 3 would
    take over the page of step 1, or with a stored result not run at all.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or context.flow_run.run_count < 2:
        return
    first = (context.flow_run.run_count - 1) * PAGES_PER_START
    for flow in flows:
        context.task_run_dynamic_keys[Task(fn=flow.fn).task_key] = first


async def was_cancelled(who: FlowIdentity) -> bool:
    """Say whether a person ended this run, and not a host that shuts down.

    Prefect's worker sends SIGTERM for both; for a cancel the server knows. Without a worker it was
    Ctrl-C or a signal by hand.
    """
    if who.flow_run_id is None or who.deployment_id is None:
        return True
    try:
        async with asyncio.timeout(STATE_S), get_client() as client:
            flow_run = await client.read_flow_run(flow_run_id=UUID(who.flow_run_id))
    except Exception:  # whatever the server's outage looks like, the run is being freed
        logger.exception("the server does not say whether the run was cancelled")
        return False
    cancelled = {StateType.CANCELLING, StateType.CANCELLED}
    return flow_run.state is not None and flow_run.state.type in cancelled
