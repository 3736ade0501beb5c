"""What a row in verl's format must look like; a broken one is named by file and row."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import types

from rlcore.errors import DataError


def check_columns(table: pa.Table, origin: str, *, prompt_key: str, data_source_key: str) -> None:
    """Check that the needed columns are there, and that every value can go into the journal.

    Raises:
        DataError: names the file, the missing columns and those that are there, or a column of
            times, bytes or the like.
    """
    needed = [prompt_key, data_source_key, "reward_model"]
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        raise DataError(
            f"{origin}: column {', '.join(missing)} is missing; the file has "
            f"{', '.join(table.column_names)} (data.prompt_key and data.reward_fn_key name the "
            "first two)"
        )
    for field in table.schema:
        if not _is_json_type(field.type):
            raise DataError(
                f"{origin}: column {field.name} has type {field.type}; rows travel as JSON, so "
                "make it text, numbers, lists or structs, or leave it out"
            )


def _is_json_type(kind: pa.DataType) -> bool:
    """Tell whether values of an arrow type become JSON values as they are."""
    if types.is_struct(kind):
        return all(_is_json_type(field.type) for field in kind)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_json_type(kind.value_type)
    if types.is_dictionary(kind):
        return _is_json_type(kind.value_type)
    plain = (types.is_null, types.is_boolean, types.is_integer, types.is_floating,
             types.is_string, types.is_large_string)  # fmt: skip
    return any(is_kind(kind) for is_kind in plain)


def check_row(
    row: Mapping[str, Any], origin: str, *, prompt_key: str, data_source_key: str
) -> None:
    """Check one row.

    Args:
        row: As read from the file.
        origin: File and row, for the message.
        prompt_key: Column with the chat messages.
        data_source_key: Column by which the reward rule is chosen.

    Raises:
        DataError: a value is missing or of the wrong type; says what is needed.
    """
    _check_messages(row[prompt_key], f"{origin}: {prompt_key}")
    source = row[data_source_key]
    if not isinstance(source, str) or not source:
        raise DataError(f"{origin}: {data_source_key} must be a text, is {_show(source)}")
    reward_model = row["reward_model"]
    if not isinstance(reward_model, Mapping) or reward_model.get("ground_truth") is None:
        raise DataError(
            f"{origin}: reward_model must be {{style, ground_truth}}, is {_show(reward_model)}"
        )
    extra_info = row.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, Mapping):
        raise DataError(f"{origin}: extra_info must be a mapping, is {_show(extra_info)}")


def question_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text by which two rows count as the same question: all messages, in order."""
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _check_messages(messages: object, origin: str) -> None:
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{origin} must be a list of messages {{role, content}}, is {_show(messages)}"
        )
    for message in messages:
        if not isinstance(message, Mapping):
            raise DataError(f"{origin}: a message must be {{role, content}}, is {_show(message)}")
        for name in ("role", "content"):
            value = message.get(name)
            if not isinstance(value, str) or not value:
                raise DataError(f"{origin}: a message's {name} must be a text, is {_show(value)}")


def _show(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
