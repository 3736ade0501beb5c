"""Everything about data, model folder, reward and output that can be wrong before a run starts."""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlcore.config import RunConfig
from rlcore.data.dataset import PromptDataset, load_dataset
from rlcore.data.rows import question_of
from rlcore.data.tokenizer import load_tokenizer, stop_token_ids
from rlcore.errors import ConfigError, DataError
from rlcore.reward.function import load_reward_function
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
    data_sources: list[str]
    """Of both sets, sorted."""
    steps_per_epoch: int
    total_steps: int

    def lines(self) -> list[str]:
        """Return the report as lines for a person."""
        return [
            f"training prompts  {self.num_train} ({self.num_overlong_train} too long, left out)",
            f"held-out prompts  {self.num_val} ({self.num_overlong_val} too long, left out)",
            f"data sources      {', '.join(self.data_sources)}",
            f"steps per epoch   {self.steps_per_epoch}",
            f"steps in all      {self.total_steps}",
        ]


def check_data(config: RunConfig) -> DataReport:
    """Read, check and tokenise what the run will use; costs about a second per 5,000 prompts.

    Raises:
        DataError: one clear message: the file and row, folder or sum that is wrong.
        ConfigError: the reward function, a user module or a reward rule is missing.
    """
    tokenizer = check_model_folder(config)
    load_user_modules(config.user_modules)
    load_reward_function(config)
    check_output_folder(config)
    train = load_dataset(config, "train", tokenizer)
    val = load_dataset(config, "val", tokenizer)
    total_steps = _check_steps(config, len(train))
    train_questions = _questions(train)
    val_questions = _questions(val)
    _check_held_out(train_questions, val_questions, train, val)
    return DataReport(
        num_train=len(train),
        num_val=len(val),
        num_overlong_train=train.num_overlong,
        num_overlong_val=val.num_overlong,
        data_sources=sorted(_check_sources(config, train) | _check_sources(config, val)),
        steps_per_epoch=len(train) // config.data.train_batch_size,
        total_steps=total_steps,
    )


def check_model_folder(config: RunConfig) -> PreTrainedTokenizerBase:
    """Check that the model folder has a configuration, weights, a tokenizer and a chat template.

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
    path = folder / "config.json"
    if not path.is_file():
        raise DataError(f"model folder {folder}: config.json is missing")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not JSON ({error})") from error
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise DataError(f"model folder {folder}: no weights (*.safetensors)")
    tokenizer = load_tokenizer(folder, model.trust_remote_code)
    if not stop_token_ids(folder, tokenizer):
        raise DataError(
            f"model folder {folder}: neither the tokenizer nor generation_config.json names an "
            "end-of-sequence token, so no response could end"
        )
    limit = values.get("max_position_embeddings")
    needed = config.data.max_prompt_length + config.data.max_response_length
    if isinstance(limit, int) and needed > limit:
        raise DataError(
            f"data.max_prompt_length + data.max_response_length = {config.data.max_prompt_length} "
            f"+ {config.data.max_response_length} = {needed} tokens, but the model in {folder} "
            f"reads {limit}"
        )
    return tokenizer


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


def _questions(dataset: PromptDataset) -> dict[str, int]:
    """Return question -> row; the first row of a question that is there twice."""
    questions: dict[str, int] = {}
    for index in range(len(dataset)):
        questions.setdefault(question_of(dataset.row(index)["raw_prompt"]), index)
    return questions


def _check_held_out(
    train_questions: dict[str, int],
    val_questions: dict[str, int],
    train: PromptDataset,
    val: PromptDataset,
) -> None:
    """Check that held-out questions are distinct and none of them is trained on."""
    if len(val_questions) < len(val):
        raise DataError(
            f"{', '.join(map(str, val.files))}: {len(val)} held-out prompts hold only "
            f"{len(val_questions)} distinct questions; remove the repeated rows, so that each "
            "question counts once in the accuracy"
        )
    shared = [question for question in val_questions if question in train_questions]
    if shared:
        first = shared[0]
        raise DataError(
            f"{len(shared)} held-out questions are in the training files too, so accuracy would "
            f"measure memory: first {train.origin(train_questions[first])} and "
            f"{val.origin(val_questions[first])}"
        )


def _check_sources(config: RunConfig, dataset: PromptDataset) -> set[str]:
    """Return the data sources; each has a reward rule unless the reward is the user's function."""
    sources: set[str] = set()
    is_custom = config.reward.custom_reward_function.path is not None
    for index in range(len(dataset)):
        source = dataset.data_source(dataset.row(index))
        if source in sources:
            continue
        if not is_custom:
            try:
                find_rule(source)
            except ConfigError as error:
                raise ConfigError(f"{dataset.origin(index)}: {error}") from error
        sources.add(source)
    return sources
