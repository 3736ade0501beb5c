"""The tools of a worker: loaded once, called under a time limit, never fatal to a session."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rlcore.config import RunConfig
from rlcore.errors import ToolError, ToolTimeoutError
from rlcore.isolation.messages import Setup
from rlcore.isolation.pool import IsolatedPool, Limits
from rlcore.tools.calls import InvalidCall, ToolCall
from rlcore.tools.functions import Tool, ToolAnswer, load_tools, run_tool

RUNNER = "rlcore.tools.toolbox:make_runner"
MAX_MEMORY_MB = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolTask:
    """One call: plain data, it goes to another process."""

    name: str
    arguments: dict[str, Any]


def make_runner(config: RunConfig) -> Callable[[ToolTask], Awaitable[ToolAnswer]]:
    """Return what a tool process does with a task.

    Raises:
        ConfigError: the tools cannot be loaded.
    """
    settings = config.actor_rollout_ref.rollout.multi_turn
    tools = load_tools(settings.function_tool_path or "")

    async def run(task: ToolTask) -> ToolAnswer:
        return await run_tool(tools[task.name], task.arguments, settings)

    return run


class Toolbox:
    """Calls the tools of `multi_turn.function_tool_path`.

    Attributes:
        tools: By name; empty without a file.
    """

    def __init__(self, config: RunConfig) -> None:
        """Load the tools.

        Raises:
            ConfigError: the file or a tool in it is wrong.
        """
        self._settings = config.actor_rollout_ref.rollout.multi_turn
        path = self._settings.function_tool_path
        self.tools: dict[str, Tool] = load_tools(path) if path is not None else {}
        self._pool = IsolatedPool(
            Setup(factory=RUNNER, config=config, max_memory_mb=MAX_MEMORY_MB),
            Limits(
                timeout_s=self._settings.tool_timeout,
                start_s=config.deadlines.start,
                what="the tool",
                timeout_key="multi_turn.tool_timeout",
                error=ToolError,
                timeout_error=ToolTimeoutError,
            ),
            num_processes=self._settings.num_tool_workers,
        )
        self._has_begun = False

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """OpenAI function schemas of all tools."""
        return [tool.schema for tool in self.tools.values()]

    async def call(self, call: ToolCall | InvalidCall) -> ToolAnswer:
        """Answer a call; whatever goes wrong is an answer that says so."""
        if isinstance(call, InvalidCall):
            return ToolAnswer(text=f"Error: {call.reason}", is_error=True)
        tool = self.tools.get(call.name)
        if tool is None:
            known = ", ".join(self.tools) or "none"
            text = f"Error: there is no tool {call.name[:80]!r}; there are: {known}"
            return ToolAnswer(text=text, is_error=True)
        try:
            if tool.is_async:
                async with asyncio.timeout(self._settings.tool_timeout):
                    return await run_tool(tool, call.arguments, self._settings)
            if not self._has_begun:
                self._has_begun = True
                self._pool.begin()
            return await self._pool.call(ToolTask(name=call.name, arguments=call.arguments))
        except TimeoutError:
            text = f"Error: {call.name} took longer than {self._settings.tool_timeout:g} s"
        except ToolError as error:
            text = f"Error: {str(error).splitlines()[0]}"
        return ToolAnswer(text=text, is_error=True)

    async def close(self) -> None:
        """End the processes."""
        await self._pool.close()
