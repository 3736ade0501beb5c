"""Section `data`: the files of prompts and how they become token ids."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from rlcore.config.base import Factor, Paths, PathText, Prompts, Section, Seed, Tokens
from rlcore.config.pending import GEN_BATCH


def _all_or_some(value: int) -> int:
    if value == 0 or value < -1:
        raise ValueError("it must be -1 (all) or at least 1")
    return value


MaxSamples = Annotated[Prompts, AfterValidator(_all_or_some)]


class CustomClassConfig(Section):
    """A data set class of the user's, made as verl makes it."""

    path: PathText | None = None
    """Python file; null: the files are read as they are."""
    name: str | None = None
    """Class in that file; called with data_files, tokenizer, processor, config, max_samples."""


class SamplerConfig(Section):
    """What chooses the rows of an epoch."""

    class_path: PathText | None = None
    """Python file; null: `class_name` is a built-in sampler."""
    class_name: str | None = None
    """Class in that file, or `success_rate`, a curriculum; null: `data.shuffle` decides."""
    kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Passed on to the sampler (ours)."""


class DataConfig(Section):
    """Prompts of training and validation."""

    train_files: Paths = Field(min_length=1)
    """Files of training prompts in verl's row format: parquet, JSON lines, or a folder that
    `datasets` wrote by save_to_disk; one path or a list."""
    val_files: Paths = Field(min_length=1)
    """Files of held-out prompts; one path or a list."""
    train_weights: tuple[Annotated[Factor, Field(gt=0)], ...] | None = None
    """Share of each training file in an epoch, in any unit; null: as many as it has rows (ours)."""
    train_batch_size: Prompts = Field(default=1024, ge=1)
    """Prompts per step."""
    gen_batch_size: Annotated[Prompts | None, GEN_BATCH] = Field(default=None, ge=1)
    """Prompts that are fed at once; null: what the mode does."""
    max_prompt_length: Tokens = Field(default=512, ge=1)
    """Tokens of a prompt at most, chat template included."""
    max_response_length: Tokens = Field(default=512, ge=1)
    """Tokens of a response at most, tool tokens included."""
    prompt_key: str = "prompt"
    """Column of the chat messages."""
    reward_fn_key: str = "data_source"
    """Column that names the data source, by which the rule of the reward is chosen."""
    filter_overlong_prompts: bool = False
    """Leave out prompts over `max_prompt_length`; otherwise `truncation` decides."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """A prompt that is too long and not filtered is refused, or cut: `left` keeps its last
    `max_prompt_length` tokens, `right` the first, `middle` half of them from each end."""
    shuffle: bool = True
    """Shuffle the training prompts anew in every epoch."""
    seed: Seed | None = Field(default=None, ge=0)
    """Seed of the order of the prompts; null: the run's `seed`."""
    train_max_samples: MaxSamples = -1
    """Use only this many rows of the training files; -1: all."""
    val_max_samples: MaxSamples = -1
    """Use only this many rows of the validation files; -1: all."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Passed on to the tokenizer's chat template."""
    custom_cls: CustomClassConfig = Field(default_factory=CustomClassConfig)
    """A data set class of the user's."""
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    """What chooses the rows of an epoch."""
    cache_dir: PathText = Field(default="~/.cache/rollflow/data")
    """Folder for rows that were read and checked, by what they were made of (ours)."""
