"""The usable prompts of a run, and what is fed to the ledger from them."""

import hashlib
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlcore.config import RunConfig
from rlcore.data.build import BuildRequest, build_store, open_sources
from rlcore.data.custom import CustomSource, code_digest
from rlcore.data.order import Place, PromptOrder
from rlcore.data.store import RowStore
from rlcore.data.tokenizer import load_tokenizer
from rlcore.types import PromptSpec

__all__ = ["PromptDataset", "PromptOrder", "load_dataset", "make_specs"]


class PromptDataset:
    """Prompts by number: what was kept, in file order. A pickled one is small.

    Attributes:
        store: The rows on disk, with what was found when they were read.
    """

    def __init__(self, store: RowStore, *, data_source_key: str) -> None:
        self.store = store
        self._data_source_key = data_source_key

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.row(index)

    @property
    def files(self) -> list[Path]:
        """The files that the rows come from."""
        return [Path(file) for file in self.store.meta.files]

    @property
    def num_overlong(self) -> int:
        """Rows left out because their prompt exceeds `data.max_prompt_length`."""
        return self.store.meta.num_overlong

    def row(self, index: int) -> dict[str, Any]:
        """Return the columns of a row; the chat messages are under `raw_prompt`."""
        return self.store[index]

    def data_source(self, row: dict[str, Any]) -> str:
        """Return the value by which the row's reward rule is chosen."""
        return row[self._data_source_key]

    def origin(self, index: int) -> str:
        """Return `file row N` (from 0) for messages."""
        return self.store.origin(index)


def load_dataset(
    config: RunConfig, split: str, tokenizer: PreTrainedTokenizerBase | None = None
) -> PromptDataset:
    """Return the training (`train`) or held-out (`val`) prompts of a run.

    The first call reads, checks and measures every row, about 7,000 per second; later ones, in any
    process, find the result in `data.cache_dir` as long as files and settings are the same.

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
    is_train = split == "train"
    files = data.train_files if is_train else data.val_files
    max_samples = data.train_max_samples if is_train else data.val_max_samples
    sample_seed = config.data_seed if is_train and data.shuffle else None
    if data.custom_cls.path is None:
        request = BuildRequest(
            sources=open_sources(files),
            data=data,
            max_samples=max_samples,
            sample_seed=sample_seed,
        )
    else:
        # The class chooses its samples and reads its files, which may be folders or addresses.
        request = BuildRequest(
            sources=[CustomSource(files, data, tokenizer, max_samples=max_samples)],
            data=data,
            extra=[split, code_digest(data.custom_cls.path), data.custom_cls.name, *files],
        )
    store = build_store(request, tokenizer, Path(model.path))
    return PromptDataset(store, data_source_key=data.reward_fn_key)


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

    The uid follows from run, partition, epoch, row and how often the epoch had the row before, so
    feeding the same positions again names the same prompts. A held-out prompt is used once per
    validation: there the step takes the epoch's place.
    """
    specs: list[PromptSpec] = []
    for position in range(start, start + count):
        place = order.locate(position)
        if validate:
            place = place._replace(epoch=global_step)
        row = dataset.row(place.row)
        fields = {name: value for name, value in row.items() if name != "raw_prompt"}
        fields.update(data_source=dataset.data_source(row), origin=dataset.origin(place.row))
        specs.append(
            PromptSpec(
                uid=make_uid(run_id, partition_id, place),
                partition_id=partition_id,
                global_step=global_step,
                epoch=place.epoch,
                index=place.row,
                repeat=place.repeat,
                raw_prompt=row["raw_prompt"],
                num_sessions=num_sessions,
                validate=validate,
                fields=fields,
            )
        )
    return specs


def make_uid(run_id: str, partition_id: str, place: Place) -> str:
    """Return a readable id that no other prompt of any run has; without underscore."""
    digest = hashlib.sha256(f"{run_id}\n{partition_id}".encode()).hexdigest()[:8]
    split = partition_id.rpartition("/")[2].replace("_", "-")
    epoch = f"{place.epoch}.{place.repeat}" if place.repeat else str(place.epoch)
    return f"{split}-{epoch}-{place.row}-{digest}"


def index_of_uid(uid: str) -> int:
    """Return the row that `make_uid` put into a uid."""
    return int(uid.rsplit("-", 2)[1])
