"""Lineage: one record from data to promotion, in the folder and as an artifact of the flow run."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

from prefect.artifacts import acreate_markdown_artifact

from rlcore.trainer.run_folder import write_atomically

logger = logging.getLogger(__name__)

GIT_S = 10.0
ORDER = (
    "candidate",
    "run_folder",
    "data_hash",
    "data_files",
    "evaluation_hash",
    "start_from",
    "config",
    "git_commit",
    "checkpoint",
    "evaluation",
    "promotion",
)


async def git_commit(folder: Path) -> str | None:
    """Return the commit that is checked out in `folder`; None where that is no repository."""
    try:
        process = await asyncio.create_subprocess_exec(
            "git", "-C", str(folder), "rev-parse", "HEAD",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
    except FileNotFoundError:
        return None
    async with asyncio.timeout(GIT_S):
        out, _ = await process.communicate()
    return out.decode().strip() or None


def lineage_file(root: Path, candidate: str) -> Path:
    """Return the file that holds a candidate's lineage."""
    return root / "lineage" / f"{candidate}.json"


def read_lineage(root: Path, candidate: str) -> dict[str, Any]:
    """Return a candidate's lineage; empty where it was not made by `retrain`."""
    file = lineage_file(root, candidate)
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


async def record_lineage(root: Path, candidate: str, **links: Any) -> dict[str, Any]:
    """Add links to a candidate's lineage and show it on the page of the flow run."""
    lineage = {**read_lineage(root, candidate), "candidate": candidate, **links}
    file = lineage_file(root, candidate)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(lineage, indent=2) + "\n")
    await acreate_markdown_artifact(
        key="lineage", markdown=lineage_markdown(lineage), description=f"lineage of {candidate}"
    )
    return lineage


def lineage_markdown(lineage: dict[str, Any]) -> str:
    """Return the lineage as a table, from data to promotion."""
    known = [name for name in ORDER if name in lineage]
    others = sorted(set(lineage) - set(ORDER))
    lines = ["| | |", "|---|---|"]
    for name in [*known, *others]:
        value = lineage[name]
        items = value if isinstance(value, list) else [value]
        cell = "<br>".join(str(item).replace("|", "\\|") for item in items)
        lines.append(f"| {name.replace('_', ' ')} | {cell} |")
    return "\n".join(lines)
