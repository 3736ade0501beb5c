"""Artifacts of a run's page: made once, brought up to date in place. Driver only."""

import asyncio
import base64
import logging
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar
from uuid import UUID

from prefect.artifacts import Artifact, ImageArtifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

logger = logging.getLogger(__name__)

T = TypeVar("T")

REQUEST_S = 30.0
"""For one artifact, or for the trackers; what is shown never holds the run up for longer."""

MAX_IMAGE_BYTES = 100_000
"""Of a data URI: it is stored in Prefect's database and sent with every look at it."""


class RunArtifacts:
    """One artifact per key, under the run and not under the page that happens to be open.

    Args:
        flow_run_id: The run's flow run; None: the one that is running when an artifact is made.
    """

    def __init__(self, flow_run_id: str | None) -> None:
        self._flow_run_id = None if flow_run_id is None else UUID(flow_run_id)
        self._ids: dict[str, UUID] = {}

    async def show(self, artifact: Artifact) -> None:
        """Make the artifact, or give the one with its key this content."""
        assert artifact.key is not None
        known = self._ids.get(artifact.key)
        if known is not None:
            await shown_or_logged(_update(known, artifact))
            return
        artifact.flow_run_id = self._flow_run_id
        made = await shown_or_logged(artifact.acreate())
        if made is not None:
            self._ids[artifact.key] = made.id


def image_artifact(path: Path, *, key: str, description: str) -> ImageArtifact | None:
    """Return a PNG file as an artifact that needs no file server; None where it is too large."""
    text = base64.b64encode(path.read_bytes()).decode("ascii")
    url = f"data:image/png;base64,{text}"
    if len(url) > MAX_IMAGE_BYTES:
        logger.warning(
            "%s is not shown: %d bytes as text, at most %d", path, len(url), MAX_IMAGE_BYTES
        )
        return None
    return ImageArtifact(key=key, image_url=url, description=description)


async def _update(artifact_id: UUID, artifact: Artifact) -> None:
    async with get_client() as client:
        await client.update_artifact(
            artifact_id,
            ArtifactUpdate(data=await artifact.aformat(), description=artifact.description),
        )


async def shown_or_logged(call: Awaitable[T]) -> T | None:
    """Await a request of Prefect's server; one that fails is logged, and the run goes on."""
    try:
        return await asyncio.wait_for(call, REQUEST_S)
    except Exception:
        logger.exception("an artifact could not be written")
        return None
