"""Section `data`: the files of prompts and how they become token ids."""

from typing import Any, Literal

from pydantic import Field

from rlcore.config.base import Paths, Prompts, Section, Seed, Tokens


class DataConfig(Section):
    """Prompts of training and validation."""

    train_files: Paths = Field(min_length=1)
    """Parquet files of training prompts in verl's row format; one path or a list."""
    val_files: Paths = Field(min_length=1)
    """Parquet files of held-out prompts; one path or a list."""
    train_batch_size: Prompts = Field(default=1024, ge=1)
    """Prompts per step."""
    max_prompt_length: Tokens = Field(default=512, ge=1)
    """Tokens of a prompt at most, chat template included."""
    max_response_length: Tokens = Field(default=512, ge=1)
    """Tokens of a response at most, tool tokens included."""
    prompt_key: str = "prompt"
    """Column of the chat messages."""
    reward_fn_key: str = "data_source"
    """Column that names the data source, by which the rule of the reward is chosen."""
    filter_overlong_prompts: bool = False
    """Leave out prompts over `max_prompt_length`; otherwise such a prompt is an error."""
    truncation: Literal["error"] = "error"
    """What happens to a prompt that is too long and not filtered."""
    shuffle: bool = True
    """Shuffle the training prompts anew in every epoch."""
    seed: Seed | None = Field(default=None, ge=0)
    """Seed of the order of the prompts; null: the run's `seed`."""
    train_max_samples: Prompts = Field(default=-1, ge=-1)
    """Use only this many rows of the training files; -1: all."""
    val_max_samples: Prompts = Field(default=-1, ge=-1)
    """Use only this many rows of the validation files; -1: all."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Passed on to the tokenizer's chat template."""
