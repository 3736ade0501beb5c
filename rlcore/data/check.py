"""Everything about data, model folder, reward and output that can be wrong before a run starts."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlcore.agent_loop.choice import AgentLoopChooser
from rlcore.config import RunConfig
from rlcore.data.dataset import PromptDataset, load_dataset
from rlcore.data.duplicates import shared_rows
from rlcore.data.samplers import load_sampler
from rlcore.data.store import RowStore, StoreMeta
from rlcore.data.tokenizer import (
    check_same_tokens,
    load_tokenizer,
    read_json_object,
    read_tokenizer,
    stop_token_ids,
)
from rlcore.errors import ConfigError, DataError
from rlcore.reward.function import load_reward_function, uses_rules
from rlcore.reward.rules import find_rule
from rlcore.user_code import load_user_modules


@dataclass(frozen=True, kw_only=True, slots=True)
class DataReport:
    """What `check_data` found."""

    num_train: int
    """Usable training prompts."""
    num_val: int
    num_overlong_train: int
    """Training prompts left out because they are too long."""
    num_overlong_val: int
    num_truncated_train: int
    """Training prompts that will be cut."""
    num_truncated_val: int
    num_duplicates: int
    """Training prompts whose question an earlier one asks too."""
    tokens_train: dict[str, float]
    """`min`, `mean`, `max` of the training prompts' tokens."""
    data_sources: list[str]
    """Of both sets, sorted."""
    steps_per_epoch: int
    total_steps: int
    notes: list[str]
    """What is worth knowing and stops nothing."""

    def lines(self) -> list[str]:
        """Return the report as lines for a person."""
        tokens = self.tokens_train
        return [
            f"training prompts  {self.num_train} ({self.num_overlong_train} too long, left out; "
            f"{self.num_truncated_train} cut)",
            f"held-out prompts  {self.num_val} ({self.num_overlong_val} too long, left out; "
            f"{self.num_truncated_val} cut)",
            f"prompt tokens     {tokens['min']:.0f} to {tokens['max']:.0f}, "
            f"{tokens['mean']:.0f} on average",
            f"data sources      {', '.join(self.data_sources)}",
            f"steps per epoch   {self.steps_per_epoch}",
            f"steps in all      {self.total_steps}",
            *(f"note              {note}" for note in self.notes),
        ]


def check_data(config: RunConfig) -> DataReport:
    """Read, check and tokenise what the run will use; about 7,000 prompts per second, once.

    Memory stays the same however many rows there are, but for some bytes per row.

    Raises:
        DataError: one clear message: the files and rows, folder or sum that is wrong.
        ConfigError: the reward function, a user module, a sampler, a reward rule or an agent
            loop is missing.
    """
    tokenizer = check_model_folder(config)
    load_user_modules(config.user_modules)
    load_reward_function(config)
    check_output_folder(config)
    train, val = all_at_once(
        lambda: load_dataset(config, "train", tokenizer),
        lambda: load_dataset(config, "val", tokenizer),
    )
    sources = train.store.meta.data_sources | val.store.meta.data_sources
    agent_names = train.store.meta.agent_names | val.store.meta.agent_names
    total_steps, *_ = all_at_once(
        lambda: _check_steps(config, len(train)),
        lambda: check_held_out(train.store, val.store),
        lambda: _check_sampler(config, train),
        lambda: _check_sources(config, sources),
        lambda: _check_agent_names(config, agent_names),
    )
    of_train, of_val = train.store.meta, val.store.meta
    return DataReport(
        num_train=len(train),
        num_val=len(val),
        num_overlong_train=of_train.num_overlong,
        num_overlong_val=of_val.num_overlong,
        num_truncated_train=of_train.num_truncated,
        num_truncated_val=of_val.num_truncated,
        num_duplicates=of_train.num_duplicates,
        tokens_train=of_train.tokens,
        data_sources=sorted(sources),
        steps_per_epoch=len(train) // config.data.train_batch_size,
        total_steps=total_steps,
        notes=_notes(of_train),
    )


def all_at_once(*checks: Callable[[], Any]) -> list[Any]:
    """Return what each check returns; what several of them find wrong is one error.

    Raises:
        ConfigError: if all that is wrong is such.
        DataError: otherwise.
    """
    results: list[Any] = []
    errors: list[DataError | ConfigError] = []
    for check in checks:
        try:
            results.append(check())
        except (DataError, ConfigError) as error:
            errors.append(error)
    if errors:
        kind = ConfigError if all(isinstance(e, ConfigError) for e in errors) else DataError
        messages = dict.fromkeys(map(str, errors))  # a file of both sets is told once
        raise kind("\n".join(messages)) from errors[0]
    return results


def _notes(meta: StoreMeta) -> list[str]:
    notes: list[str] = []
    if meta.num_duplicates:
        later, earlier = meta.duplicates[0]
        repeat = "repeats" if meta.num_duplicates == 1 else "repeat"
        notes.append(
            f"{meta.num_duplicates} training prompts {repeat} an earlier question: first {later} "
            f"asks what {earlier} does"
        )
    if meta.hidden_columns:
        notes.append(
            f"column {', '.join(meta.hidden_columns)} of the files: sessions get a field of that "
            "name from rollflow instead"
        )
    return notes


def _check_sampler(config: RunConfig, train: PromptDataset) -> None:
    sampler = load_sampler(config, train)
    if sampler is not None:
        batch_size = config.data.train_batch_size
        sampler.check(len(train) // batch_size * batch_size)


def check_model_folder(config: RunConfig) -> PreTrainedTokenizerBase:
    """Check that the model folder has a configuration, weights, a tokenizer and a chat template.

    A teacher's folder needs no chat template, but the same tokenizer.

    Returns:
        The tokenizer.

    Raises:
        DataError: says what is missing.
    """
    model = config.actor_rollout_ref.model
    folder = Path(model.path)
    if not folder.is_dir():
        raise DataError(
            f"model folder {folder} (actor_rollout_ref.model.path): no such folder; "
            "`rollflow prepare smollm2` and `rollflow prepare tiny` make the presets' models"
        )
    values = _model_values(folder)
    tokenizer = load_tokenizer(folder, model.trust_remote_code)
    if not stop_token_ids(folder, tokenizer):
        raise DataError(
            f"model folder {folder}: neither the tokenizer nor generation_config.json names an "
            "end-of-sequence token, so no response could end"
        )
    _check_positions(config, folder, values)
    if config.teacher_path is not None:
        _check_teacher_folder(config, Path(config.teacher_path), tokenizer)
    return tokenizer


def _model_values(folder: Path) -> dict[str, Any]:
    """Return what config.json holds, in a folder with weights."""
    path = folder / "config.json"
    if not path.is_file():
        raise DataError(f"model folder {folder}: config.json is missing")
    values = read_json_object(path)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise DataError(f"model folder {folder}: no weights (*.safetensors)")
    return values


def _check_positions(config: RunConfig, folder: Path, values: dict[str, Any]) -> None:
    limit = values.get("max_position_embeddings")
    needed = config.data.max_prompt_length + config.data.max_response_length
    if isinstance(limit, int) and needed > limit:
        raise DataError(
            f"data.max_prompt_length + data.max_response_length = {config.data.max_prompt_length} "
            f"+ {config.data.max_response_length} = {needed} tokens, but the model in {folder} "
            f"reads {limit}"
        )


def _check_teacher_folder(
    config: RunConfig, folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    if not folder.is_dir():
        raise DataError(
            f"model folder {folder} (distillation.teacher_models.teacher_model.model_path): "
            "no such folder"
        )
    values = _model_values(folder)
    _check_positions(config, folder, values)
    trust = config.actor_rollout_ref.model.trust_remote_code
    check_same_tokens(tokenizer, read_tokenizer(folder, trust), folder)
    num_rows, last = values.get("vocab_size"), max(tokenizer.get_vocab().values())
    if isinstance(num_rows, int) and last >= num_rows:
        raise DataError(
            f"model folder {folder}: the teacher's vocabulary has {num_rows} rows, but its "
            f"tokenizer gives ids up to {last}"
        )


def check_output_folder(config: RunConfig) -> None:
    """Check that the run folder can be made and written to; creates its parent.

    Raises:
        DataError: it cannot; says why.
    """
    trainer = config.trainer
    folder = Path(trainer.default_local_dir or trainer.runs_root)
    key = "trainer.default_local_dir" if trainer.default_local_dir else "trainer.runs_root"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DataError(f"output folder {folder} ({key}) is not writable: {error}") from error


def _check_steps(config: RunConfig, num_train: int) -> int:
    batch = config.data.train_batch_size
    if num_train < batch:
        raise DataError(
            f"{num_train} usable training prompts are fewer than one batch: "
            f"data.train_batch_size={batch}"
        )
    steps_per_epoch = num_train // batch
    epochs = config.trainer.total_epochs
    possible = epochs * steps_per_epoch
    wanted = config.trainer.total_training_steps
    if wanted is not None and wanted > possible:
        raise DataError(
            f"trainer.total_training_steps={wanted} is more than the data gives: "
            f"{num_train} prompts // {batch} per step = {steps_per_epoch} steps per epoch, "
            f"x trainer.total_epochs={epochs} = {possible} steps; raise total_epochs or lower "
            "total_training_steps"
        )
    return wanted or possible


def check_held_out(train: RowStore, val: RowStore) -> None:
    """Check that held-out questions are distinct and none of them is trained on.

    Raises:
        DataError: names the files, how many questions there are, and the first rows.
    """
    if val.meta.num_duplicates:
        later, earlier = val.meta.duplicates[0]
        raise DataError(
            f"{', '.join(val.meta.files)}: {len(val)} held-out prompts hold only "
            f"{len(val) - val.meta.num_duplicates} distinct questions: {later} asks what {earlier} "
            "does; remove the repeated rows, so that each question counts once in the accuracy"
        )
    shared = list(shared_rows(train, val))
    if shared:
        in_train, in_val = shared[0]
        raise DataError(
            f"{len(shared)} held-out questions are in the training files too, so accuracy would "
            f"measure memory: first {train.origin(in_train)} and {val.origin(in_val)}"
        )


def _check_sources(config: RunConfig, sources: dict[str, str]) -> None:
    """Check that each data source has a reward rule, unless the reward is the user's function."""
    if not uses_rules(config):
        return
    _look_up(find_rule, sources)


def _check_agent_names(config: RunConfig, names: dict[str, str]) -> None:
    """Check that there is a default agent loop, and one of each name that rows give."""
    agent = config.actor_rollout_ref.rollout.agent
    chooser = AgentLoopChooser(agent.default_agent_loop, agent.agent_loop_config_path)
    _look_up(chooser.choose, names)


def _look_up(find: Callable[[str], Any], names: dict[str, str]) -> None:
    """Look every name up; `names` says where each comes from.

    Raises:
        ConfigError: tells of all that are not found.
    """
    problems: list[str] = []
    for name, origin in names.items():
        try:
            find(name)
        except ConfigError as error:
            problems.append(f"{origin}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
