"""Retraining: snapshot → validate → train → evaluate against promoted and base → gate → event.

Runs in the pool rollflow-aux and starts what needs devices in rollflow-train. Started by an event
or a schedule; it never waits for one.
"""

import asyncio
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

from prefect import State, flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.states import Completed

from rlcore.retraining.active import only_one, record_trained, take_notes, trained_hashes
from tasks.attempts import this_flow_run
from tasks.retrain_steps import Retraining, RetrainRequest


@flow(name="retrain", retries=0, persist_result=False)
async def retrain(  # noqa: PLR0913  what a deployment may set
    files: list[str],
    preset: str,
    overrides: dict[str, Any] = {},  # noqa: B006  the form shows an object; never changed
    start_from: Literal["promoted", "base", "run"] = "promoted",
    run: str | None = None,
    replay_fraction: float = 0.25,
    min_gain: float = 0.01,
    alpha: float = 0.05,
    root: str = "retraining",
    store: str = "promoted",
    train_with: str = "train/grpo-smollm2",
    evaluate_with: str = "evaluate-policy/grpo-smollm2",
    deadline_s: float = 86400,
) -> State:
    """Train on new data and say whether the result is better than what is in use.

    Args:
        files: Parquet files of new rows.
        preset: Of the training; its model is the base, its held-out files the evaluation set.
        overrides: Dotted key to value, over the preset.
        start_from: The promoted model (the base, where none is), the base, or the result of `run`.
        run: Run id, with start_from=run.
        replay_fraction: Share of all older rows that is trained again beside the new ones.
        min_gain: Least gain in accuracy, over promoted and base.
        alpha: Largest p-value of the paired sign test against each.
        root: Folder of snapshots, outcomes and lineage.
        store: Folder or fsspec URL of promoted models.
        train_with: Deployment of `train` to run.
        evaluate_with: Deployment of `evaluate-policy` to run.
        deadline_s: For the training, and for each evaluation.

    Returns:
        Completed: `rollflow.candidate.ready` was emitted. Named Rejected: the gate was not passed;
        Skipped: the data was trained before; Dirty: another retraining is active and starts one
        more at its end.
    """
    request = RetrainRequest(
        files=files, preset=preset, overrides=overrides, start_from=start_from, run=run,
        replay_fraction=replay_fraction, min_gain=min_gain, alpha=alpha, root=root, store=store,
        train_with=train_with, evaluate_with=evaluate_with, deadline_s=deadline_s,
    )  # fmt: skip
    who = this_flow_run()
    with only_one(Path(root), f"flow run {who.flow_run_id}", request.as_parameters()) as is_first:
        if not is_first:
            return Completed(name="Dirty", message="another retraining is active; one more follows")
        data_hash, state = await retrain_once(request)
    await start_one_more(request, data_hash)
    return state


async def retrain_once(request: RetrainRequest) -> tuple[str, State]:
    """Do one retraining; return the hash of its data and how it ended."""
    work = Retraining(request)
    snapshot = await asyncio.to_thread(work.snapshot)
    before = trained_hashes(work.root).get(snapshot.data_hash)
    if before is not None:
        message = f"data {snapshot.data_hash} was trained before, by run {before}"
        return snapshot.data_hash, Completed(name="Skipped", message=message)
    await asyncio.to_thread(work.validate, snapshot)
    candidate = await work.train(snapshot)
    comparisons = await work.evaluate(candidate, snapshot)
    await work.record(candidate, snapshot, comparisons)
    record_trained(work.root, snapshot.data_hash, candidate)
    for comparison in comparisons:
        get_run_logger().info(comparison.line())
    told = "; ".join(comparison.line() for comparison in comparisons)
    if not all(comparison.passes for comparison in comparisons):
        return snapshot.data_hash, Completed(name="Rejected", message=f"{candidate}: {told}")
    work.announce(candidate, snapshot, comparisons)
    return snapshot.data_hash, Completed(message=f"{candidate} is ready: {told}")


async def start_one_more(request: RetrainRequest, data_hash: str) -> None:
    """Start the one retraining that others asked for meanwhile, if its data differs."""
    noted = take_notes(Path(request.root))
    who = this_flow_run()
    if noted is None or who.deployment_id is None:
        return
    snapshot = await asyncio.to_thread(Retraining(RetrainRequest(**noted)).snapshot)
    if snapshot.data_hash == data_hash:
        get_run_logger().info("what was asked for meanwhile is the same data: nothing to do")
        return
    async with get_client() as client:
        await client.create_flow_run_from_deployment(
            UUID(who.deployment_id), parameters=noted, idempotency_key=f"after-{who.flow_run_id}"
        )
    get_run_logger().info("data %s follows", snapshot.data_hash)
