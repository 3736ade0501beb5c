"""Look after a training whose heartbeats stopped; an automation starts this for each."""

from uuid import UUID

from prefect import State, flow
from prefect.client.orchestration import get_client
from prefect.states import Completed, Crashed

from tasks.silence import why_not_dead


@flow(name="check-heartbeat", flow_run_name="check-{flow_run_id}", retries=0, persist_result=False)
async def check_heartbeat(flow_run_id: str) -> State:
    """Mark a silent training Crashed if its process is dead, which has it continued.

    Args:
        flow_run_id: The training flow run without heartbeats.

    Returns:
        Completed; named Alive where nothing was to be done, with the reason.
    """
    async with get_client() as client:
        reason = await why_not_dead(client, flow_run_id)
        if reason is not None:
            return Completed(name="Alive", message=reason)
        dead = Crashed(message="no heartbeat; its process or its host is dead")
        await client.set_flow_run_state(UUID(flow_run_id), dead, force=True)
    return Completed(message="marked Crashed")
