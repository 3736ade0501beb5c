"""What a row in verl's format must look like; a broken one is named by file and row."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import types

from rlcore.errors import DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
OURS = ("raw_prompt", "uid", "session_id", "global_steps", "validate", "index", "origin")
"""Fields that a session is given by us: a column of that name would be hidden."""


def check_columns(schema: pa.Schema, origin: str, *, prompt_key: str, data_source_key: str) -> None:
    """Check that the needed columns are there, and that every value can go into the journal.

    Raises:
        DataError: names the file, the missing columns and those that are there, or a column of
            times, bytes or the like.
    """
    check_names(schema.names, origin, prompt_key=prompt_key, data_source_key=data_source_key)
    for field in schema:
        if not _is_json_type(field.type):
            raise DataError(
                f"{origin}: column {field.name} has type {field.type}; rows travel as JSON, so "
                "make it text, numbers, lists or structs, or leave it out"
            )


def check_names(
    names: Sequence[str], origin: str, *, prompt_key: str, data_source_key: str
) -> None:
    """Check that the needed columns are there.

    Raises:
        DataError: names the missing columns and those that are there.
    """
    needed = [prompt_key, data_source_key, "reward_model"]
    missing = [name for name in needed if name not in names]
    if missing:
        raise DataError(
            f"{origin}: column {', '.join(missing)} is missing; the file has "
            f"{', '.join(names)} (data.prompt_key and data.reward_fn_key name the first two)"
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
    check_names(list(row), origin, prompt_key=prompt_key, data_source_key=data_source_key)
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
    agent_name = row.get("agent_name")
    if agent_name is not None and not isinstance(agent_name, str):
        raise DataError(f"{origin}: agent_name must be a text, is {_show(agent_name)}")


def encode_row(row: Mapping[str, Any], origin: str) -> bytes:
    """Return a row as one line of JSON.

    Arrays and scalars of numpy or torch, which a data set of the user's may hold, become lists and
    numbers.

    Raises:
        DataError: a value is NaN, infinite, broken text or no JSON; names its place in the row.
    """
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, default=_as_plain)
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:
        reason = "text with a lone surrogate, which no UTF-8 can hold"
    except ValueError:
        reason = "a number that is not finite (missing values are often written as NaN)"
    except TypeError as error:
        raise DataError(f"{origin}: {error}; rows travel as JSON") from error
    raise DataError(f"{origin}: {_place_of(row) or 'a value'} is {reason}")


def _as_plain(value: object) -> object:
    tolist = getattr(value, "tolist", None)
    if callable(tolist):
        return tolist()
    raise TypeError(f"a value of type {type(value).__name__} is no JSON")


def _place_of(value: Any, path: str = "") -> str | None:
    """Return where the first number that is not finite, or broken text, is."""
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    if isinstance(value, str):
        return path if any("\ud800" <= character <= "\udfff" for character in value) else None
    if isinstance(value, Mapping):
        items = ((f"{path}.{name}".lstrip("."), item) for name, item in value.items())
    elif isinstance(value, Sequence):
        items = ((f"{path}[{number}]", item) for number, item in enumerate(value))
    else:
        return None
    return next((found for p, item in items if (found := _place_of(item, p)) is not None), None)


def tidy_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without the empty keys that a column type gives to all of them.

    Chat templates ask whether a message *has* `tool_calls`, not whether it is null.
    """
    return [
        {name: value for name, value in message.items() if value is not None or name == "content"}
        for message in messages
    ]


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
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise DataError(f"{origin}: a message's role must be a text, is {_show(role)}")
        if role not in ROLES:
            raise DataError(f"{origin}: role {role!r} is unknown; known: {', '.join(ROLES)}")
        only_calls = role == "assistant" and message.get("tool_calls")
        if (not isinstance(content, str) or not content) and not only_calls:
            raise DataError(f"{origin}: a message's content must be a text, is {_show(content)}")


def _show(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
