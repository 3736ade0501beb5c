"""Rows of a data set class of the user's (`data.custom_cls.{path,name}`), made as verl makes it."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlcore.config.data import DataConfig
from rlcore.errors import ConfigError, DataError
from rlcore.user_code import load_user_object

LIST_LIKE = ("__len__", "__getitem__")


class CustomSource:
    """The items of an object of the user's class, in order; each is read once, at start.

    The class is called with `data_files, tokenizer, processor, config, max_samples`, has
    `__len__` and `__getitem__`, and an item is a row: a mapping with the chat messages under
    `data.prompt_key` or `raw_prompt`, `data_source`, `reward_model` and what else a session needs.

    Raises:
        ConfigError: the class is missing or no such class.
        DataError: it cannot be made, or has no items.
    """

    schema = None

    def __init__(
        self,
        files: Sequence[str | Path],
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_samples: int = -1,
    ) -> None:
        assert data.custom_cls.path is not None and data.custom_cls.name is not None
        self._prompt_key = data.prompt_key
        self.path = Path(data.custom_cls.path)
        self._name = data.custom_cls.name
        cls = load_user_object(self.path, self._name)
        missing = [name for name in LIST_LIKE if not hasattr(cls, name)]
        if not isinstance(cls, type) or missing:
            raise ConfigError(
                f"{self.path}: {self._name} (data.custom_cls) must be a class with "
                f"{' and '.join(LIST_LIKE)}"
            )
        try:
            self._items: Any = cls(
                data_files=[str(file) for file in files],
                tokenizer=tokenizer,
                processor=None,
                config=data,
                max_samples=max_samples,
            )
        except Exception as error:  # the user's code may raise anything
            raise DataError(
                f"{self.path}: {self._name} cannot be made: {type(error).__name__}: {error}"
            ) from error
        if len(self._items) == 0:
            raise DataError(f"{self.path}: {self._name} has no items")

    def count(self) -> int:
        """Return the number of items."""
        return len(self._items)

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield item number and row.

        Raises:
            DataError: an item cannot be read or is no mapping; names it.
        """
        for number in range(len(self._items)):
            try:
                item = self._items[number]
            except Exception as error:  # the user's code may raise anything
                raise DataError(
                    f"{self.path} row {number}: {self._name} raised {type(error).__name__}: {error}"
                ) from error
            if not isinstance(item, Mapping):
                raise DataError(
                    f"{self.path} row {number}: {self._name} gave {type(item).__name__}, not a row"
                )
            row = {str(name): value for name, value in item.items()}
            if self._prompt_key not in row and "raw_prompt" in row:
                row[self._prompt_key] = row.pop("raw_prompt")
            row.pop("dummy_tensor", None)  # verl's classes give it where their batches need one
            yield number, row


def code_digest(path: str | Path) -> str:
    """Return a digest of a file of code: what it makes may change with it."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
