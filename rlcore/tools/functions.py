"""Tools: functions of a Python file that a model may call.

    @function_tool
    def calculator(expression: Annotated[str, Field(description="such as 3 * (4 + 5)")]) -> str:
        '''Evaluate an arithmetic expression.'''

Name, docstring and annotations become the schema that the model sees, and check its arguments.
"""

import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError, validate_call

from rlcore.config.rollout import MultiTurnConfig
from rlcore.errors import ConfigError
from rlcore.user_code import load_user_module

_MARK = "_rollflow_tool_schema"
CUT = "...(cut)..."


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolAnswer:
    """What a tool says; a tool may return one to give a reward too."""

    text: str
    reward: float | None = None
    """Kept in `tool_rewards`, which reward functions see; not added to the score."""
    is_error: bool = False
    """The call could not be run, or the tool raised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """One tool."""

    name: str
    schema: dict[str, Any]
    """OpenAI's function schema."""
    function: Callable[..., Any]
    """Checks its arguments."""
    is_async: bool


def function_tool(
    function: Callable[..., Any] | None = None, *, schema: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Mark a function, sync or async, as a tool.

    A sync one runs in a process of its own and may hang or crash. An async one runs in the worker's
    event loop, for many calls at a time: it must await what takes long.

    Args:
        function: The function, when used without parentheses.
        schema: OpenAI function schema to show instead of the one from annotations.
    """

    def mark(marked: Callable[..., Any]) -> Callable[..., Any]:
        setattr(marked, _MARK, dict(schema) if schema is not None else {})
        return marked

    return mark if function is None else mark(function)


def load_tools(path: str) -> dict[str, Tool]:
    """Return the tools of a Python file, or of an installed module (a name without .py), by name.

    Raises:
        ConfigError: it cannot be loaded, has no tool, or a tool has no docstring.
    """
    module = load_user_module(path) if path.endswith(".py") else _import(path)
    marked = [value for value in vars(module).values() if hasattr(value, _MARK)]
    if not marked:
        raise ConfigError(f"{path}: no function is marked @function_tool")
    tools = [_make_tool(path, function) for function in marked]
    return {tool.name: tool for tool in tools}


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"multi_turn.function_tool_path={name}: neither a .py file nor an installed module: "
            f"{error}"
        ) from error


def _make_tool(path: str, function: Callable[..., Any]) -> Tool:
    schema = getattr(function, _MARK)
    if not schema:
        if not function.__doc__:
            raise ConfigError(f"{path}: {function.__name__} needs a docstring: the model reads it")
        schema = {
            "name": function.__name__,
            "description": inspect.cleandoc(function.__doc__),
            "parameters": _parameters(function),
        }
    if schema.get("type") != "function":
        schema = {"type": "function", "function": schema}
    return Tool(
        name=schema["function"]["name"],
        schema=schema,
        function=validate_call(function),
        is_async=inspect.iscoroutinefunction(function),
    )


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function's arguments."""
    adapter: TypeAdapter[Any] = TypeAdapter(cast("Any", function))
    return adapter.json_schema()


async def run_tool(
    tool: Tool, arguments: Mapping[str, Any], settings: MultiTurnConfig
) -> ToolAnswer:
    """Call a tool; what it raises becomes an answer that says so."""
    try:
        result = tool.function(**arguments)
        if inspect.isawaitable(result):
            result = await result
        answer = as_answer(result)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        answer = ToolAnswer(text=f"Error: {'; '.join(problems)}", is_error=True)
    except Exception as error:  # noqa: BLE001  a tool may raise anything; the model is told
        answer = ToolAnswer(text=f"Error: {type(error).__name__}: {error}", is_error=True)
    text = cut(answer.text, settings.max_tool_response_length, settings.tool_response_truncate_side)
    return ToolAnswer(text=text, reward=answer.reward, is_error=answer.is_error)


def as_answer(result: object) -> ToolAnswer:
    """Return what a tool's result says: text as it is, nothing as an empty text, else JSON."""
    if isinstance(result, ToolAnswer):
        return result
    if result is None or isinstance(result, str):
        return ToolAnswer(text=result or "")
    return ToolAnswer(text=json.dumps(result, default=str))


def cut(text: str, limit: int, side: str) -> str:
    """Shorten a text to about `limit` characters; `side` (verl's) is the part that is kept.

    Raises:
        ValueError: unknown side.
    """
    if len(text) <= limit:
        return text
    match side:
        case "left":
            return text[:limit] + CUT
        case "right":
            return CUT + text[-limit:]
        case "middle":
            half = limit // 2
            return text[: limit - half] + CUT + (text[-half:] if half else "")
        case _:
            raise ValueError(f"unknown side {side!r}")
