"""Which prompts come next: a pure function of the position, so that a resume is a number."""

from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from rlcore.config import RunConfig
from rlcore.data.dataset import PromptDataset, PromptOrder, load_dataset, make_specs
from rlcore.data.tokenizer import load_tokenizer
from rlcore.types import PromptSpec


class PromptSource:
    """The training order and the held-out set of a run; files are read once per process."""

    def __init__(self, config: RunConfig, run_id: str) -> None:
        self._config = config
        self._run_id = run_id

    def _dataset(self, split: str) -> PromptDataset:
        return _dataset(self._config.model_dump_json(by_alias=True), split)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the policy's tokenizer."""
        model = self._config.actor_rollout_ref.model
        return load_tokenizer(model.path, model.trust_remote_code)

    @property
    def order(self) -> PromptOrder:
        """The order of the training prompts."""
        data = self._config.data
        return PromptOrder(
            num_rows=len(self._dataset("train")),
            batch_size=data.train_batch_size,
            shuffle=data.shuffle,
            seed=self._config.data_seed,
        )

    def train_specs(self, *, start: int, count: int, global_step: int) -> list[PromptSpec]:
        """Return prompts `start` to `start + count - 1` of the training order."""
        return make_specs(
            self._dataset("train"),
            self.order,
            start=start,
            count=count,
            run_id=self._run_id,
            partition_id=f"{self._run_id}/train",
            global_step=global_step,
            num_sessions=self._config.actor_rollout_ref.rollout.n,
            validate=False,
        )

    def val_specs(self, *, global_step: int) -> list[PromptSpec]:
        """Return all held-out prompts, with uids of their own for each step."""
        dataset = self._dataset("val")
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


@lru_cache(maxsize=4)
def _dataset(config: str, split: str) -> PromptDataset:
    """Read the files once per process; keyed by text, since a configuration holds dicts."""
    return load_dataset(RunConfig.model_validate_json(config), split)
