"""Continue the run of a crashed attempt; an automation starts this for each that Crashed."""

from prefect import State, flow, get_run_logger
from prefect.client.orchestration import get_client
from prefect.states import Completed, Failed

from tasks.continuation import Continuation, continue_attempt, find_continuation


@flow(name="continue-run", flow_run_name="continue-{flow_run_id}", retries=0, persist_result=False)
async def continue_run(flow_run_id: str) -> State:
    """Start a new attempt with `resume`, as a new run of the same deployment.

    Args:
        flow_run_id: The training flow run that crashed.

    Returns:
        Completed; named Skipped where there is nothing to continue, with the reason. Failed, when
        the run has used its attempts.
    """
    async with get_client() as client:
        found = await find_continuation(client, flow_run_id)
        if not isinstance(found, Continuation):
            return Completed(name="Skipped", message=found)
        if found.attempts >= found.max_attempts:
            return Failed(
                message=f"run {found.run_id} has used its {found.max_attempts} attempts "
                "(trainer.max_attempts)"
            )
        started = await continue_attempt(client, found)
    get_run_logger().info("run %s goes on in flow run %s", found.run_id, started.name)
    return Completed(message=f"run {found.run_id} goes on in flow run {started.name}")
