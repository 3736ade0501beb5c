"""JSON lines: one object per line, read as a stream; blank lines are passed over."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlcore.errors import DataError


class JsonLinesSource:
    """The rows of one .jsonl file; row numbers count lines from 0, blank ones included."""

    schema = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def count(self) -> int:
        """Return the number of lines that are not blank."""
        with self.path.open("rb") as file:
            return sum(1 for line in file if line.strip())

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield row number and columns.

        Raises:
            DataError: a line is not one JSON object in UTF-8; names the row.
        """
        with self.path.open("rb") as file:
            for number, line in enumerate(file):
                if line.strip():
                    yield number, self._parse(number, line)

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        origin = f"{self.path} row {number}"
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 0 else "utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{origin}: not UTF-8 text ({error})") from error
        except json.JSONDecodeError as error:
            raise DataError(
                f"{origin}: not JSON ({error}); a file of JSON lines has one whole object per line"
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"{origin}: a line must be an object {{column: value}}, is {type(row).__name__}"
            )
        return row
