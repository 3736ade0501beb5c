"""Weight versions: names of trainer states, never used twice for different bytes."""

from collections.abc import Sequence
from pathlib import Path

from rlcore.errors import CheckpointError
from rlcore.trainer.run_folder import write_atomically


class WeightVersions:
    """Numbers the trainer's states from 0.

    A state gets its number when it is first published or saved, and keeps it. The newest number
    given out lies in a file of the run folder, so that a later attempt that resumes from an
    older state does not give it to other weights. The numbers that it leaves out for that are
    `skipped`: who counts updates between two versions takes them off.

    Example:
        >>> versions = WeightVersions(folder / "weight_version")
        >>> versions.current(), versions.current()
        (0, 0)
        >>> versions.state_changed(); versions.current()
        1
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._current: int | None = None
        self._last: int | None = None
        self.skipped: list[int] = []
        """Numbers of other attempts' states that lie between those of this line, ascending."""

    @property
    def newest(self) -> int:
        """Highest version given out, -1 if none was.

        Raises:
            CheckpointError: the file holds no number.
        """
        if not self._path.exists():
            return -1
        text = self._path.read_text(encoding="utf-8")
        try:
            return int(text)
        except ValueError:
            raise CheckpointError(f"{self._path}: {text!r} is not a weight version") from None

    @property
    def present(self) -> int:
        """The version of the present state, or the one that it will get."""
        return self.newest + 1 if self._current is None else self._current

    def current(self) -> int:
        """Return the version of the present state, a new one if it has none yet."""
        if self._current is None:
            version = self.newest + 1
            if self._last is not None:
                self.skipped += range(self._last + 1, version)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, str(version))
            self._current = self._last = version
        return self._current

    def state_changed(self) -> None:
        """The weights are other ones now."""
        self._current = None

    def restore(self, version: int, skipped: Sequence[int] = ()) -> None:
        """The weights are those of `version` again, whose line left `skipped` out."""
        self._current = self._last = version
        self.skipped = list(skipped)
