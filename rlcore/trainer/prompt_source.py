"""The prompts of a run in every process: read and checked once, named by position."""

import logging
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlcore.config import RunConfig
from rlcore.data.dataset import PromptDataset, load_dataset, make_specs
from rlcore.data.loader import PromptLoader
from rlcore.data.order import PromptOrder
from rlcore.data.samplers import SamplerState
from rlcore.data.tokenizer import load_tokenizer
from rlcore.errors import DataError
from rlcore.types import PromptSpec, SampledBatch

logger = logging.getLogger(__name__)


class PromptSource:
    """The training order and the held-out set of a run; travels as configuration and digest.

    Raises:
        DataError: the files were changed between two processes of an attempt.
    """

    def __init__(self, config: RunConfig, run_id: str) -> None:
        self._config = config
        self._run_id = run_id
        self.digest: str | None = None
        self.digest = self._loader.dataset.store.meta.digest
        """Of the training rows; every process that gets a copy of this object reads the same."""

    @property
    def _loader(self) -> PromptLoader:
        loader = _loader(self._config.model_dump_json(by_alias=True))
        found = loader.dataset.store.meta.digest
        if self.digest not in (None, found):
            files = ", ".join(map(str, loader.dataset.files))
            raise DataError(
                f"{files} changed while the run goes on: rows {found} instead of {self.digest}; "
                "put the files back and resume the run, or start a new one"
            )
        return loader

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the policy's tokenizer."""
        model = self._config.actor_rollout_ref.model
        return load_tokenizer(model.path, model.trust_remote_code)

    @property
    def order(self) -> PromptOrder:
        """The order of the training prompts, where no sampler learns from results."""
        return self._loader.order()

    def begin(self, sampler: SamplerState | None, *, start: int, count: int) -> SamplerState | None:
        """Return the sampler's state with which `train_specs` names these prompts."""
        return self._loader.begin(sampler, start=start, count=count)

    def train_specs(
        self,
        *,
        start: int,
        count: int,
        global_step: int,
        sampler: SamplerState | None = None,
    ) -> list[PromptSpec]:
        """Return prompts `start` to `start + count - 1` of the training order."""
        return self._loader.specs(
            sampler, start=start, count=count, run_id=self._run_id, global_step=global_step
        )

    def train_fields(self, index: int) -> dict[str, Any]:
        """Return the columns of a training row, its messages as `raw_prompt`."""
        dataset = self._loader.dataset
        row = dataset.row(index)
        return {**row, "data_source": dataset.data_source(row)}

    def train_origin(self, index: int) -> str:
        """Return `file row N` of a training row, for messages."""
        return self._loader.dataset.origin(index)

    def observe(self, sampler: SamplerState | None, batch: SampledBatch) -> SamplerState | None:
        """Return the sampler's state after a batch that was scored."""
        return self._loader.observe(sampler, batch)

    def val_specs(self, *, global_step: int) -> list[PromptSpec]:
        """Return all held-out prompts, with uids of their own for each step."""
        dataset = _val_dataset(self._config.model_dump_json(by_alias=True))
        return make_specs(
            dataset,
            PromptOrder(num_rows=len(dataset), batch_size=len(dataset), shuffle=False, seed=0),
            start=0,
            count=len(dataset),
            run_id=self._run_id,
            partition_id=f"{self._run_id}/val",
            global_step=global_step,
            num_sessions=self._config.actor_rollout_ref.rollout.val_kwargs.n,
            validate=True,
        )

    def tell_changes(self, digest: str | None) -> None:
        """Warn when a checkpoint was written with other training rows than there are now."""
        if digest not in (None, self.digest):
            logger.warning(
                "the training rows are not those of the checkpoint (%s, now %s): the order goes on "
                "at the same position of another data set",
                digest,
                self.digest,
            )


@lru_cache(maxsize=2)
def _loader(config: str) -> PromptLoader:
    """Open the rows once per process; keyed by text, since a configuration holds dicts."""
    read = RunConfig.model_validate_json(config)
    return PromptLoader(read, load_dataset(read, "train"))


@lru_cache(maxsize=2)
def _val_dataset(config: str) -> PromptDataset:
    return load_dataset(RunConfig.model_validate_json(config), "val")
