"""End a run from outside: by Prefect's cancel, or by the Ctrl-C that its terminal would send."""

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling

from rlcore.errors import CheckpointError


async def stop_run(folder: Path, *, has_server: bool) -> str:
    """Ask the newest attempt of a run to end; return what was done.

    A deployment's run is cancelled on the server, and its worker sees to it. Any other is a process
    of this host, and is interrupted: it frees everything and can be resumed.

    Args:
        folder: The run folder.
        has_server: Whether PREFECT_API_URL names a server.

    Raises:
        CheckpointError: no attempt is running, or it runs on another host.
    """
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    newest = record["attempts"][-1] if record["attempts"] else {}
    if not newest or "outcome" in newest:
        ended = newest.get("outcome", "never begun")
        raise CheckpointError(f"run {record['run_id']} is not running: it is {ended}")
    if has_server and newest.get("flow_run_id") and await _cancelled(newest["flow_run_id"]):
        return f"run {record['run_id']}: its flow run is being cancelled"
    process = _process(folder, record["run_id"], newest)
    process.send_signal(signal.SIGINT)
    return f"run {record['run_id']}: process {process.pid} is interrupted"


async def _cancelled(flow_run_id: str) -> bool:
    """Cancel a deployment's flow run; False where a worker has no part in it."""
    async with get_client() as client:
        try:
            flow_run = await client.read_flow_run(UUID(flow_run_id))
        except ObjectNotFound:
            return False
        if flow_run.deployment_id is None:
            return False
        await client.set_flow_run_state(flow_run.id, Cancelling(message="by `rollflow stop`"))
    return True


def _process(folder: Path, run_id: str, attempt: dict[str, Any]) -> psutil.Process:
    note = folder / "run.holder"
    holder = note.read_text(encoding="utf-8").strip() if note.is_file() else ""
    if holder and not holder.endswith(f" on {socket.gethostname()})"):
        raise CheckpointError(f"run {run_id} is held by {holder}: stop it there")
    try:
        process = psutil.Process(attempt["pid"])
    except psutil.NoSuchProcess:
        process = None
    # A pid that was given to another process since is younger than the attempt.
    if process is None or process.create_time() > attempt["began"] or process.pid == os.getpid():
        raise CheckpointError(
            f"run {run_id}: its process {attempt['pid']} is gone; `rollflow resume` continues it"
        )
    return process
