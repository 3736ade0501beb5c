"""Folders that are complete or absent: written aside, renamed last, described by a manifest."""

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlcore.errors import DataError

MANIFEST = "rollflow_manifest.json"


def is_complete(folder: Path, recipe: Mapping[str, Any]) -> bool:
    """Tell whether `folder` was made by the same recipe and still has every file at its size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    if manifest.get("recipe") != json.loads(json.dumps(recipe)):
        return False
    sizes: dict[str, int] = manifest.get("files", {})
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == size
        for name, size in sizes.items()
    )


@contextmanager
def staged_folder(folder: Path, recipe: Mapping[str, Any]) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` when the block ends without an error.

    A reader never sees half a folder, and an interrupted preparation is simply done again. The
    previous folder is replaced only if it was prepared by this product (it has a manifest).

    Raises:
        DataError: `folder` exists, is not empty and was not prepared by rollflow.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
        raise DataError(
            f"{folder} exists and was not prepared by rollflow; choose another folder or move it"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.parent / f".{folder.name}.staging-{uuid.uuid4().hex[:8]}"
    staging.mkdir()
    try:
        yield staging
        files = {
            str(path.relative_to(staging)): path.stat().st_size
            for path in sorted(staging.rglob("*"))
            if path.is_file()
        }
        manifest = {"recipe": dict(recipe), "files": files}
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
