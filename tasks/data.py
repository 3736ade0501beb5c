"""What the flow `prepare_data` does: one task, and what a person sees of the result."""

import asyncio
import base64
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

from rlcore.data.prepare import PreparedReport, prepare_named, read_report

MAX_IMAGE_BYTES = 100_000
"""A larger histogram is named by its path instead of being shown."""


@task(name="prepare", persist_result=False, cache_policy=NO_CACHE, retries=0)
async def prepare_task(name: str, out: str | None, settings: dict[str, Any]) -> list[str]:
    """Make a model folder or a data set; return the folders."""
    # In a thread: drawing and checking take minutes, and the flow's loop must not stand still.
    folders = await asyncio.to_thread(prepare_named, name, out, settings)
    return [str(folder) for folder in folders]


async def show_prepared(folder: Path) -> dict[str, Any]:
    """Show report and histogram of a data set and say that it is there; return the report.

    The event `rollflow.data.prepared` carries the digest: an automation on it starts a training
    when, and only when, the data is new.
    """
    report = read_report(folder)
    if report is None:
        return {"folder": str(folder)}
    content = {"folder": str(folder), **asdict(report)}
    await acreate_markdown_artifact(
        key="prepared-data", markdown=_markdown(folder, report), description=str(folder)
    )
    emit_event(
        event="rollflow.data.prepared",
        resource={"prefect.resource.id": f"rollflow.data.{report.digest[:16]}"},
        payload=content,
    )
    return content


def _markdown(folder: Path, report: PreparedReport) -> str:
    lines = [f"**{folder}**", "", "```", *report.lines(), "```", ""]
    image = (folder / "lengths.png").read_bytes()
    if len(image) <= MAX_IMAGE_BYTES:
        encoded = base64.b64encode(image).decode("ascii")
        lines.append(f"![lengths](data:image/png;base64,{encoded})")
    else:
        lines.append(f"Histogram: {folder / 'lengths.png'}")
    return "\n".join(lines)
