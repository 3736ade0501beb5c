"""The promoted model: an atomic switch of `current`, in a local folder or behind an fsspec URL.

    <store>/versions/<candidate>/   the model's files, written whole before anything points there
            current.json            the pointer: candidate, when, why, and those before it
            current                 local stores only: a link to the version, for readers

The pointer is written last and in one piece, so a reader sees the old version or the new one.
"""

import json
import os
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from rlcore.errors import CheckpointError
from rlcore.trainer.run_folder import write_atomically

POINTER = "current.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Promotion:
    """What `current` points to."""

    candidate: str
    """Run id."""
    promoted_at: float
    reason: str
    history: tuple[dict[str, Any], ...]
    """Promotions before this one, newest first."""

    def as_dict(self) -> dict[str, Any]:
        """Return what is written into the pointer."""
        return {**self.entry(), "history": list(self.history)}

    def entry(self) -> dict[str, Any]:
        """Return it as others' history has it."""
        return {
            "candidate": self.candidate,
            "promoted_at": self.promoted_at,
            "reason": self.reason,
        }


class PromotedStore:
    """A place for promoted models.

    Example:
        >>> store = PromotedStore("promoted")
        >>> store.promote("nightly-7", Path("runs/nightly-7/model"), reason="gate passed")
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, self._root = fsspec.core.url_to_fs(url)

    @property
    def is_local(self) -> bool:
        """Whether the store is a folder of this host."""
        return isinstance(self._fs, LocalFileSystem)

    def current(self) -> Promotion | None:
        """Return what is promoted, or None.

        Raises:
            CheckpointError: the pointer cannot be read.
        """
        pointer = f"{self._root}/{POINTER}"
        self._fs.invalidate_cache()
        if not self._fs.exists(pointer):
            return None
        try:
            found = json.loads(self._fs.cat_file(pointer))
            return Promotion(
                candidate=found["candidate"],
                promoted_at=found["promoted_at"],
                reason=found["reason"],
                history=tuple(found["history"]),
            )
        except (json.JSONDecodeError, KeyError) as error:
            raise CheckpointError(f"{self.url}/{POINTER} cannot be read: {error!r}") from error

    def promote(self, candidate: str, model: Path, *, reason: str) -> Promotion:
        """Make a candidate's model the current one; again, it changes nothing.

        Args:
            candidate: Its run id, which names the version.
            model: Its Hugging Face folder.
            reason: Why, for the record.

        Raises:
            CheckpointError: the model folder is not there.
        """
        now = self.current()
        if now is not None and now.candidate == candidate and self._has(candidate):
            return now
        if not (model / "config.json").is_file():
            raise CheckpointError(f"{model}: not a model folder (no config.json)")
        if not self._has(candidate):
            self._upload(candidate, model)
        before = () if now is None else (now.entry(), *now.history)
        promotion = Promotion(
            candidate=candidate, promoted_at=time.time(), reason=reason, history=before
        )
        self._point(promotion)
        return promotion

    def rollback(self) -> Promotion:
        """Point to the promotion before the current one.

        Raises:
            CheckpointError: there is none, or its files are gone.
        """
        now = self.current()
        if now is None or not now.history:
            raise CheckpointError(f"{self.url}: there is no promotion to go back to")
        entry, *rest = now.history
        if not self._has(entry["candidate"]):
            raise CheckpointError(f"{self.url}: the files of {entry['candidate']} are gone")
        promotion = Promotion(**entry, history=tuple(rest))
        self._point(promotion)
        return promotion

    def model_path(self, cache: Path) -> Path | None:
        """Return the current model as a local folder; a remote one is copied to `cache` first."""
        now = self.current()
        if now is None:
            return None
        version = self._version(now.candidate)
        if self.is_local:
            return Path(version)
        local = cache / now.candidate
        if not local.is_dir():
            staged = cache / f".{now.candidate}.{uuid.uuid4().hex[:8]}"
            staged.parent.mkdir(parents=True, exist_ok=True)
            self._fs.get(f"{version}/", f"{staged}/", recursive=True)
            staged.rename(local)
        return local

    def _version(self, candidate: str) -> str:
        return f"{self._root}/versions/{candidate}"

    def _has(self, candidate: str) -> bool:
        # config.json goes up last.
        return self._fs.exists(f"{self._version(candidate)}/config.json")

    def _upload(self, candidate: str, model: Path) -> None:
        version = self._version(candidate)
        if self.is_local:
            staged = Path(f"{version}.{uuid.uuid4().hex[:8]}.tmp")
            staged.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(model, staged)
            shutil.rmtree(version, ignore_errors=True)
            staged.rename(version)
            return
        files = sorted(path for path in model.rglob("*") if path.is_file())
        for path in sorted(files, key=lambda path: path.name == "config.json"):
            target = f"{version}/{path.relative_to(model).as_posix()}"
            self._fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            self._fs.put_file(str(path), target)

    def _point(self, promotion: Promotion) -> None:
        text = json.dumps(promotion.as_dict(), indent=2) + "\n"
        if not self.is_local:
            self._fs.pipe_file(f"{self._root}/{POINTER}", text.encode())
            return
        root = Path(self._root)
        link = root / f".current.{uuid.uuid4().hex[:8]}"
        link.symlink_to(Path("versions") / promotion.candidate)
        write_atomically(root / POINTER, text)
        os.replace(link, root / "current")
