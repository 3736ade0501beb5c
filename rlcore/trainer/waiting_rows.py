"""Rows of groups that wait to be sampled, in a checkpoint and back; strays are removed."""

import logging
from pathlib import Path

import torch

from rlcore.buffer.transfer_queue import QueueClient
from rlcore.cluster.ledger_client import LedgerClient
from rlcore.schema import ROLLOUT_COLUMNS
from rlcore.types import CallKey

logger = logging.getLogger(__name__)

FILE = "waiting_rows.pt"


def save_waiting_rows(
    ledger: LedgerClient, queue: QueueClient, partition_id: str, folder: Path
) -> int:
    """Write the rows of the finished groups of a partition to `folder`; return how many.

    Nothing is written where none waits. Rows that are not in the queue (any more) are left out:
    their prompts run again.
    """
    wanted = [key for keys in ledger.waiting_rows(partition_id).values() for key in keys]
    missing = set(queue.incomplete(partition_id, wanted, ROLLOUT_COLUMNS)) if wanted else set[str]()
    keys = [key for key in wanted if key not in missing]
    if keys:
        columns = queue.get(partition_id, keys, ROLLOUT_COLUMNS)
        torch.save({"keys": keys, "columns": columns}, folder / FILE)
    return len(keys)


def restore_waiting_rows(
    ledger: LedgerClient, queue: QueueClient, key: CallKey, partition_id: str, folder: Path | None
) -> list[str]:
    """Make queue and ledger agree after a restart.

    Rows of groups that wait are kept where the queue has them, else read from the checkpoint, else
    their prompts run again. Rows of prompts that nobody waits for are removed.

    Args:
        ledger: Restored already.
        queue: Of this attempt, or one that outlived the last.
        key: Who calls.
        partition_id: The training partition.
        folder: The checkpoint; None without one.

    Returns:
        The uids that run again.
    """
    view = ledger.view(partition_id)
    waiting = ledger.waiting_rows(partition_id)
    held = {uid for status in ("pending", "running", "finished", "failure") for uid in view[status]}
    strays = [row for row in queue.list(partition_id) if row.split("_")[0] not in held]
    if strays:
        logger.info("%d rows of an earlier attempt are removed", len(strays))
        queue.clear(partition_id, strays)
    wanted = [row for rows in waiting.values() for row in rows]
    if not wanted:
        return []
    missing = set(queue.incomplete(partition_id, wanted, ROLLOUT_COLUMNS))
    missing -= _put_saved(queue, partition_id, missing, folder)
    again = [uid for uid, rows in waiting.items() if missing & set(rows)]
    if again:
        logger.warning("the rows of %d finished groups are gone; they run again", len(again))
        ledger.return_to_pending(key, again)
    return again


def _put_saved(
    queue: QueueClient, partition_id: str, missing: set[str], folder: Path | None
) -> set[str]:
    """Write those of `missing` that the checkpoint holds; return them."""
    file = None if folder is None else folder / FILE
    if file is None or not missing or not file.exists():
        return set()
    saved = torch.load(file, weights_only=True)
    places = {row: i for i, row in enumerate(saved["keys"]) if row in missing}
    keys = list(places)
    if keys:
        columns = {name: [c[places[row]] for row in keys] for name, c in saved["columns"].items()}
        queue.put(partition_id, keys, columns, create=True)
    return set(keys)
