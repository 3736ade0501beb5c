"""Promotion: an optional approval, then an atomic switch of `current`. No Ray, no devices."""

from pathlib import Path
from typing import Any

from prefect import State, flow, get_run_logger
from prefect.events import emit_event
from prefect.flow_runs import pause_flow_run
from prefect.states import Completed

from rlcore.retraining.promotion import PromotedStore, Promotion
from tasks.decision import Decision
from tasks.lineage import read_lineage, record_lineage

ask: Any = pause_flow_run
"""A coroutine in an async flow, which its type does not say."""

APPROVAL_S = 86400


@flow(name="promote", flow_run_name="promote-{candidate}", retries=0, persist_result=False)
async def promote(
    candidate: str,
    model: str,
    store: str = "promoted",
    root: str = "retraining",
    approval: bool = False,
    approval_timeout_s: int = APPROVAL_S,
) -> State:
    """Make a candidate the current model; promoting the current one again changes nothing.

    Args:
        candidate: Run id of the candidate.
        model: Its Hugging Face folder.
        store: Folder or fsspec URL of promoted models.
        root: Folder of the retraining, whose lineage is completed.
        approval: Wait for a person, who resumes the paused run with a decision.
        approval_timeout_s: For the decision; then the run fails and nothing is promoted.

    Returns:
        Completed; named Rejected where a person said so, with the reason.
    """
    reason = "passed the gate"
    if approval:
        evaluation = read_lineage(Path(root), candidate).get("evaluation", [])
        decision: Decision = await ask(
            wait_for_input=Decision.with_initial_data(
                description="\n".join([f"Promote **{candidate}**?", *map(str, evaluation)]),
                reason="",
            ),
            timeout=approval_timeout_s,
        )
        if decision.decision == "reject":
            await record_lineage(Path(root), candidate, promotion=f"rejected: {decision.reason}")
            return Completed(name="Rejected", message=decision.reason)
        reason = f"approved: {decision.reason}"
    done = PromotedStore(store).promote(candidate, Path(model), reason=reason)
    await record_lineage(Path(root), candidate, promotion=f"{store}: {done.reason}")
    announce(done, store)
    get_run_logger().info("%s is current in %s", candidate, store)
    return Completed(message=f"{candidate} is current in {store}: {done.reason}")


def announce(promotion: Promotion, store: str) -> None:
    """Emit `rollflow.model.promoted`."""
    emit_event(
        event="rollflow.model.promoted",
        resource={"prefect.resource.id": f"rollflow.model.{promotion.candidate}"},
        payload={**promotion.entry(), "store": store},
    )
