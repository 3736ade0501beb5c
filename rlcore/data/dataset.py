"""Prompts of parquet files, checked and filtered once, and what is fed to the ledger from them."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from rlcore.config import RunConfig
from rlcore.config.data import DataConfig
from rlcore.data.order import PromptOrder
from rlcore.data.parquet import read_table
from rlcore.data.rows import check_columns, check_row
from rlcore.data.tokenizer import load_tokenizer, render_chat
from rlcore.errors import DataError
from rlcore.types import PromptSpec

__all__ = ["PromptDataset", "PromptOrder", "load_dataset", "make_specs"]

logger = logging.getLogger(__name__)

CHUNK_ROWS = 1024


class PromptDataset:
    """The usable prompts of some files; row numbers count what was kept, in file order.

    Rows stay in memory-mapped arrow tables and are turned into Python objects one at a time. A
    pickled dataset is small: it names its files and kept rows, and reads the files again.

    Attributes:
        files: The parquet files.
        num_overlong: Rows left out because their prompt exceeds `data.max_prompt_length`.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_samples: int = -1,
        sample_seed: int | None = None,
    ) -> None:
        """Read, check and filter the rows.

        Args:
            files: Parquet files in verl's row format.
            data: Keys, lengths and template arguments.
            tokenizer: Measures the prompts.
            max_samples: Rows to use at most; -1 for all.
            sample_seed: Chooses which, at random; None takes the first.

        Raises:
            DataError: a file or row is wrong (named), or no prompt is short enough.
        """
        self.files = [Path(file) for file in files]
        self._prompt_key = data.prompt_key
        self._data_source_key = data.reward_fn_key
        self._tables: list[pa.Table] | None = None
        self._starts = np.cumsum([0, *(table.num_rows for table in self._load())])
        chosen = _choose(int(self._starts[-1]), max_samples, sample_seed)
        self._kept = self._filter(chosen, data, tokenizer)
        self.num_overlong = len(chosen) - len(self._kept)
        if not len(self._kept):
            raise DataError(
                f"{', '.join(map(str, self.files))}: none of {len(chosen)} prompts has at most "
                f"data.max_prompt_length={data.max_prompt_length} tokens"
            )
        if self.num_overlong:
            logger.info(
                "%d of %d prompts of %s have more than %d tokens and are left out",
                self.num_overlong,
                len(chosen),
                ", ".join(map(str, self.files)),
                data.max_prompt_length,
            )

    def __len__(self) -> int:
        return len(self._kept)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": None}

    def row(self, index: int) -> dict[str, Any]:
        """Return the columns of a row; the chat messages are under `raw_prompt`."""
        row = self._raw(int(self._kept[index]))
        row["raw_prompt"] = row.pop(self._prompt_key)
        return row

    def data_source(self, row: dict[str, Any]) -> str:
        """Return the value by which the row's reward rule is chosen."""
        return row[self._data_source_key]

    def origin(self, index: int) -> str:
        """Return `file row N` (from 0) for messages."""
        return self._origin(int(self._kept[index]))

    def _load(self) -> list[pa.Table]:
        if self._tables is None:
            self._tables = [read_table(file) for file in self.files]
        return self._tables

    def _locate(self, position: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._starts, position, side="right")) - 1
        return file, position - int(self._starts[file])

    def _raw(self, position: int) -> dict[str, Any]:
        file, row = self._locate(position)
        return self._load()[file].slice(row, 1).to_pylist()[0]

    def _origin(self, position: int) -> str:
        file, row = self._locate(position)
        return f"{self.files[file]} row {row}"

    def _filter(
        self, chosen: np.ndarray, data: DataConfig, tokenizer: PreTrainedTokenizerBase
    ) -> np.ndarray:
        """Check the chosen rows and return those whose prompt is short enough."""
        keys = {"prompt_key": self._prompt_key, "data_source_key": self._data_source_key}
        for file, table in zip(self.files, self._load(), strict=True):
            check_columns(table, str(file), **keys)
        kept: list[int] = []
        for first in range(0, len(chosen), CHUNK_ROWS):
            positions = [int(position) for position in chosen[first : first + CHUNK_ROWS]]
            texts: list[str] = []
            for position in positions:
                row = self._raw(position)
                check_row(row, self._origin(position), **keys)
                texts.append(self._render(row, position, data, tokenizer))
            encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
            for position, ids in zip(positions, encoded, strict=True):
                if len(ids) <= data.max_prompt_length:
                    kept.append(position)
                elif not data.filter_overlong_prompts:
                    raise DataError(
                        f"{self._origin(position)}: the prompt has {len(ids)} tokens, more than "
                        f"data.max_prompt_length={data.max_prompt_length}; raise it or set "
                        "data.filter_overlong_prompts=True"
                    )
        return np.asarray(kept, dtype=np.int64)

    def _render(
        self,
        row: dict[str, Any],
        position: int,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
    ) -> str:
        # Templates refuse e.g. unknown roles by errors of jinja2 and of their own.
        from jinja2 import TemplateError

        try:
            return render_chat(tokenizer, row[self._prompt_key], data.apply_chat_template_kwargs)
        except (TemplateError, TypeError, ValueError) as error:
            raise DataError(
                f"{self._origin(position)}: the chat template refuses the prompt: {error}"
            ) from error


def load_dataset(
    config: RunConfig, split: str, tokenizer: PreTrainedTokenizerBase | None = None
) -> PromptDataset:
    """Return the training (`train`) or held-out (`val`) prompts of a run.

    Args:
        config: Names files, lengths and model.
        split: `train` or `val`.
        tokenizer: The model's, if it is loaded already.

    Raises:
        DataError: the model folder, a file or a row is wrong; named.
    """
    data = config.data
    model = config.actor_rollout_ref.model
    tokenizer = tokenizer or load_tokenizer(model.path, model.trust_remote_code)
    if split == "train":
        return PromptDataset(
            data.train_files,
            data,
            tokenizer,
            max_samples=data.train_max_samples,
            sample_seed=config.data_seed if data.shuffle else None,
        )
    return PromptDataset(data.val_files, data, tokenizer, max_samples=data.val_max_samples)


def make_specs(  # noqa: PLR0913  what a PromptSpec is made of
    dataset: PromptDataset,
    order: PromptOrder,
    *,
    start: int,
    count: int,
    run_id: str,
    partition_id: str,
    global_step: int,
    num_sessions: int,
    validate: bool = False,
) -> list[PromptSpec]:
    """Return the prompts at positions `start` to `start + count - 1` of an order.

    The uid follows from run, partition, epoch and row, so feeding the same positions again names
    the same prompts. A held-out prompt is used once per validation: there the step takes the
    epoch's place.
    """
    specs: list[PromptSpec] = []
    for position in range(start, start + count):
        epoch, index = order.locate(position)
        if validate:
            epoch = global_step
        row = dataset.row(index)
        fields = {name: value for name, value in row.items() if name != "raw_prompt"}
        fields.update(data_source=dataset.data_source(row), origin=dataset.origin(index))
        specs.append(
            PromptSpec(
                uid=make_uid(run_id, partition_id, epoch, index),
                partition_id=partition_id,
                global_step=global_step,
                epoch=epoch,
                index=index,
                raw_prompt=row["raw_prompt"],
                num_sessions=num_sessions,
                validate=validate,
                fields=fields,
            )
        )
    return specs


def make_uid(run_id: str, partition_id: str, epoch: int, index: int) -> str:
    """Return a readable id that no other prompt of any run has; without underscore."""
    digest = hashlib.sha256(f"{run_id}\n{partition_id}".encode()).hexdigest()[:8]
    split = partition_id.rpartition("/")[2].replace("_", "-")
    return f"{split}-{epoch}-{index}-{digest}"


def _choose(num_rows: int, max_samples: int, seed: int | None) -> np.ndarray:
    if max_samples < 0 or max_samples >= num_rows:
        return np.arange(num_rows)
    if seed is None:
        return np.arange(max_samples)
    chosen = np.random.default_rng(seed).choice(num_rows, size=max_samples, replace=False)
    return np.sort(chosen)
