"""A scheduled look at data files; emits `rollflow.data.updated` when their contents changed."""

import asyncio
from pathlib import Path

from prefect import State, flow
from prefect.events import emit_event
from prefect.states import Completed

from rlcore.retraining.watch import look


@flow(name="watch-data", retries=0, persist_result=False)
async def watch_data(
    files: list[str], state: str = "retraining/watch.json", settle_s: float = 30
) -> State:
    """Look once.

    Args:
        files: Paths or patterns (`data/new/*.parquet`), relative to the project.
        state: File that remembers what was seen last.
        settle_s: A file that changed within so many seconds may still be written: wait for it.

    Returns:
        Completed; named Unchanged, or Unsettled while a file is being written.
    """
    seen = await asyncio.to_thread(look, files, Path(state), settle_s=settle_s)
    if not seen.is_new:
        return Completed(name=seen.verdict, message=f"{len(seen.files)} files")
    emit_event(
        event="rollflow.data.updated",
        resource={"prefect.resource.id": f"rollflow.data.{seen.data_hash}"},
        payload={"files": seen.files, "data_hash": seen.data_hash},
    )
    seen.remember(Path(state))
    return Completed(message=f"{seen.data_hash}: {', '.join(seen.files)}")
