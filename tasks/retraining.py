"""What `retrain` does through Prefect: run trainings and evaluations as deployments, and wait.

| waits for | unblocked by | deadline |
|---|---|---|
| a training or an evaluation | its end, or that of the attempt that continues it | `deadline_s` |
"""

import asyncio
import json
import logging
import time
from pathlib import Path
from typing import Any

from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.objects import FlowRun

from rlcore.config import RunConfig
from rlcore.errors import DataError, DeadlineExceededError, RolloutError
from rlcore.trainer.run_folder import write_atomically
from tasks.attempts import run_of_flow_run
from tasks.continuation import Continuation, continue_attempt, find_continuation

logger = logging.getLogger(__name__)

POLL_S = 2.0


async def run_to_its_end(
    deployment: str, parameters: dict[str, Any], *, key: str, config: RunConfig, deadline_s: float
) -> str:
    """Run a deployment of `train` or `evaluate-policy`; return the id of its training run.

    A crashed attempt is continued as the automation does it, with the same idempotency key, so that
    it is done once whoever comes first.

    Args:
        deployment: `flow/name`.
        parameters: Over the deployment's own.
        key: Makes a repeated call find the run that the first one started.
        config: Says where runs lie.
        deadline_s: For all attempts together, waiting for devices included.

    Raises:
        DeadlineExceededError: not ended in time.
        RolloutError: it ended otherwise than Completed.
    """
    ends = time.monotonic() + deadline_s
    async with get_client() as client:
        target = await client.read_deployment_by_name(deployment)
        flow_run = await client.create_flow_run_from_deployment(
            target.id, parameters=parameters, idempotency_key=key
        )
        while True:
            flow_run = await _ended(client, flow_run, deployment, ends, deadline_s)
            if flow_run.state is not None and flow_run.state.is_completed():
                break
            found = await find_continuation(client, str(flow_run.id))
            if not isinstance(found, Continuation) or found.attempts >= found.max_attempts:
                state = flow_run.state
                raise RolloutError(
                    f"{deployment} ({flow_run.name}) ended {state.name if state else '?'}: "
                    f"{state.message if state else ''}"
                )
            flow_run = await continue_attempt(client, found)
            logger.warning("run %s goes on in flow run %s", found.run_id, flow_run.name)
    run_id = await asyncio.to_thread(run_of_flow_run, config, str(flow_run.id))
    if run_id is None:
        run_id = await _run_of_child(config, flow_run)
    return run_id


async def _ended(
    client: PrefectClient, flow_run: FlowRun, deployment: str, ends: float, deadline_s: float
) -> FlowRun:
    while flow_run.state is None or not flow_run.state.is_final():
        if time.monotonic() >= ends:
            raise DeadlineExceededError(
                f"waited {deadline_s:.0f} s for {deployment} ({flow_run.name}), which is "
                f"{flow_run.state.name if flow_run.state else 'not begun'}; it goes on"
            )
        await asyncio.sleep(POLL_S)
        flow_run = await client.read_flow_run(flow_run.id)
    return flow_run


async def _run_of_child(config: RunConfig, flow_run: FlowRun) -> str:
    """Return the training run of a subflow: `evaluate-policy` calls `train`."""
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterParentFlowRunId

    async with get_client() as client:
        children = await client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[flow_run.id])
            )
        )
    for child in children:
        run_id = await asyncio.to_thread(run_of_flow_run, config, str(child.id))
        if run_id is not None:
            return run_id
    raise DataError(
        f"flow run {flow_run.name} left no run below {config.trainer.runs_root}; retrain and what "
        "it starts need the same folder (trainer.runs_root, relative to the project)"
    )


def outcomes_of(run_folder: Path) -> dict[str, float]:
    """Return prompt index to outcome of the newest validation of a run: its accuracy, or score.

    Raises:
        DataError: the run has no validation.
    """
    files = sorted((run_folder / "generations").glob("step-*.jsonl"))
    if not files:
        raise DataError(f"{run_folder} has no validation to compare")
    found: dict[str, float] = {}
    for line in files[-1].read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        # A failed session is a wrong answer, as in the accuracy.
        value = 0.0 if row.get("error") else row.get("acc", row.get("score"))
        found[str(row["index"])] = float(value or 0.0)
    return found


def remembered_outcomes(root: Path, evaluation_hash: str, model: str) -> dict[str, float] | None:
    """Return what `remember_outcomes` stored of a model on an evaluation set, or None."""
    file = _outcomes_file(root, evaluation_hash, model)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def remember_outcomes(
    root: Path, evaluation_hash: str, model: str, outcomes: dict[str, float]
) -> None:
    """Store a model's outcomes, so that base and promoted are evaluated once per set."""
    file = _outcomes_file(root, evaluation_hash, model)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(outcomes) + "\n")


def _outcomes_file(root: Path, evaluation_hash: str, model: str) -> Path:
    name = "".join(c if c.isalnum() or c in "-." else "-" for c in model)
    return root / "outcomes" / evaluation_hash / f"{name}.json"
