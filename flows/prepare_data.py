"""Make a data set (or a preset's model), check every row, show what it holds.

`rollflow prepare NAME key=value …` does the same without Prefect.
"""

from pathlib import Path
from typing import Any

from prefect import flow

from tasks.data import prepare_task, show_prepared


@flow(name="prepare_data", retries=0, persist_result=False)
async def prepare_data(
    name: str, out: str | None = None, settings: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Prepare a data set whole or not at all; a complete one of the same settings is left as it is.

    Args:
        name: A task of reasoning-gym, `questions`, `textarena`, `smollm2` or `tiny`.
        out: Folder; None: below `data` or `models`.
        settings: For tasks `size`, `test_size`, `seed`, `level` and the task's own; for `questions`
            `file`, `question`, `answer`, `data_source` and more; see `rollflow prepare --help`.

    Returns:
        Per folder: where it is, and for a data set counts, lengths, duplicates and digest.
    """
    folders = await prepare_task(name, out, settings or {})
    return [await show_prepared(Path(folder)) for folder in folders]
