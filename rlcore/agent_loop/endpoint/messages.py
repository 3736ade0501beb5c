"""Messages of OpenAI's form as chat templates read them, and when two are the same."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.json_http import RequestError

Message = dict[str, Any]

COMPARED = ("role", "content", "tool_calls")
"""Of the model's own messages; clients add fields of theirs to these."""


def read_messages(given: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages with content as one text and arguments of calls as objects.

    Raises:
        RequestError: one is no message, or holds something other than text.
    """
    return [_read_message(message, f"messages[{number}]") for number, message in enumerate(given)]


def answer_message(content: str, tool_calls: Sequence[Mapping[str, Any]]) -> Message:
    """Return our answer as `read_messages` would, if a client sends it back."""
    calls = {"tool_calls": list(tool_calls)} if tool_calls else {}
    return _read_message({"role": "assistant", "content": content, **calls}, "answer")


def key_of(message: Message) -> str:
    """Return what is the same for messages that mean the same."""
    if message["role"] == "assistant":
        message = {name: message[name] for name in COMPARED if name in message}
    return json.dumps(message, sort_keys=True)


def _read_message(given: Mapping[str, Any], where: str) -> Message:
    role = given.get("role")
    if not isinstance(role, str):
        raise RequestError(f"{where}.role must be a text", param=f"{where}.role")
    message = {name: value for name, value in given.items() if value is not None}
    # OpenAI's newer word, which templates do not know.
    message["role"] = "system" if role == "developer" else role
    message["content"] = _text_of(given.get("content"), f"{where}.content")
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = _read_calls(calls, f"{where}.tool_calls")
    return message


def _text_of(content: object, where: str) -> str:
    if content is None:
        return ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts: list[str] = []
    for part in parts if isinstance(parts, list) else [None]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestError(
                f"{where} must be a text or a list of parts of type text: only text models are "
                "served",
                param=where,
            )
        texts.append(text)
    return "".join(texts)


def _read_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list", param=where)
    return [_read_call(call, f"{where}[{number}]") for number, call in enumerate(calls)]


def _read_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or "name" not in function:
        raise RequestError(
            f"{where} must be {{id, type, function: {{name, arguments}}}}", param=where
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            # Templates write objects; a text would be quoted a second time.
            arguments = json.loads(arguments)
        except ValueError as error:
            raise RequestError(
                f"{where}.function.arguments: no JSON: {error}", param=where
            ) from error
    read: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    return {"id": call["id"], **read} if call.get("id") is not None else read
