"""Tokenizer of a model folder, loaded without torch: agent loop workers have none."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlcore.errors import DataError

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, KeyError, AttributeError)
"""What chat templates raise for messages that they were not written for."""


def load_tokenizer(
    model_path: str | Path, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder.

    A folder with tokenizer.json is read by the fast tokenizer as it stands, which imports no
    torch; others go through transformers' own choice of class.

    Raises:
        DataError: the folder, its tokenizer or its chat template is missing.
    """
    folder = Path(model_path)
    tokenizer = read_tokenizer(folder, trust_remote_code)
    if not tokenizer.chat_template:
        raise DataError(
            f"model folder {folder}: the tokenizer has no chat template; use an instruction-tuned "
            "model or add chat_template.jinja"
        )
    return tokenizer


def read_tokenizer(folder: Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder, with a chat template or without.

    Raises:
        DataError: the folder or its tokenizer is missing.
    """
    if not folder.is_dir():
        raise DataError(f"model folder {folder}: no such folder")
    try:
        if (folder / "tokenizer.json").is_file() and not trust_remote_code:
            return PreTrainedTokenizerFast.from_pretrained(folder)
        # Imports torch.
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise DataError(f"model folder {folder}: no readable tokenizer ({error})") from error


def check_same_tokens(
    policy: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, teacher_folder: Path
) -> None:
    """Check that two tokenizers give every token, added ones included, the same id.

    How many rows the models' vocabularies are padded to is not looked at.

    Raises:
        DataError: names how many tokens differ, and the first.
    """
    ours, theirs = policy.get_vocab(), teacher.get_vocab()
    differing = sorted(
        (token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)),
        key=lambda token: (min(ours.get(token, 1 << 62), theirs.get(token, 1 << 62)), token),
    )
    if differing:
        first = differing[0]
        raise DataError(
            f"model folder {teacher_folder} (distillation.teacher_models.teacher_model.model_path):"
            f" its tokenizer is not the policy's: {len(differing)} of {len(ours | theirs)} tokens "
            f"differ, first {first!r}: id {ours.get(first, 'none')} for the policy, "
            f"{theirs.get(first, 'none')} for the teacher; take a teacher of the policy's family"
        )


def stop_token_ids(model_path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end a response: the tokenizer's EOS and generation_config.json's.

    Raises:
        DataError: generation_config.json cannot be read.
    """
    ids: set[int] = set()
    if isinstance(tokenizer.eos_token_id, int):
        ids.add(tokenizer.eos_token_id)
    path = Path(model_path) / "generation_config.json"
    if path.is_file():
        configured = read_json_object(path).get("eos_token_id")
        listed = configured if isinstance(configured, list) else [configured]
        if not all(isinstance(token, int | None) for token in listed):
            raise DataError(f"{path}: eos_token_id is {configured!r}, not a token id or a list")
        ids.update(token for token in listed if token is not None)
    return sorted(ids)


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model folder.

    Raises:
        DataError: it holds something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not JSON ({error})") from error
    if not isinstance(values, dict):
        raise DataError(f"{path}: must hold an object {{...}}, holds {type(values).__name__}")
    return values


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any],
    *,
    is_open: bool = True,
) -> str:
    """Return the text of a conversation, up to where the model's turn begins if it `is_open`."""
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        tokenize=False,
        add_generation_prompt=is_open,
        **template_kwargs,
    )
    if not isinstance(text, str):
        raise DataError(f"the chat template gave {type(text).__name__} for one conversation")
    return text


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any],
    *,
    is_open: bool = True,
) -> list[int]:
    """Return the token ids of `render_chat`'s text, special tokens as the template wrote them."""
    text = render_chat(tokenizer, messages, template_kwargs, is_open=is_open)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def count_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[int]:
    """Return how many token ids `encode_chat` gives for each rendered text."""
    if not texts:
        return []
    return [len(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]


def cut_prompt(ids: Sequence[int], max_tokens: int, truncation: str) -> list[int]:
    """Return a prompt cut to `max_tokens` as `data.truncation` says, with verl's meaning.

    `left` cuts at the left and keeps the end, `right` keeps the beginning (and so loses the header
    of the model's turn), `middle` keeps half from each end, the larger half from the right.

    Raises:
        DataError: the prompt is too long and `truncation` is `error`.
    """
    if len(ids) <= max_tokens:
        return list(ids)
    if truncation == "left":
        return list(ids[-max_tokens:])
    if truncation == "right":
        return list(ids[:max_tokens])
    if truncation == "middle":
        half = max_tokens // 2
        return [*ids[:half], *ids[len(ids) - (max_tokens - half) :]]
    raise DataError(
        f"the prompt has {len(ids)} tokens, more than data.max_prompt_length={max_tokens} "
        "(data.truncation=error)"
    )
