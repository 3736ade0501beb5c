"""Sessions: agent loops, the worker that runs them, and what it stores."""

from rlcore.agent_loop.base import AgentLoopBase, register
from rlcore.agent_loop.environment_agent import EnvironmentAgentLoop
from rlcore.agent_loop.openai_agent import OpenAIAgentLoop
from rlcore.agent_loop.single_turn import SingleTurnAgentLoop
from rlcore.agent_loop.tool_agent import ToolAgentLoop
from rlcore.tools import function_tool
from rlcore.types import AgentLoopOutput

__all__ = [
    "AgentLoopBase",
    "AgentLoopOutput",
    "EnvironmentAgentLoop",
    "OpenAIAgentLoop",
    "SingleTurnAgentLoop",
    "ToolAgentLoop",
    "function_tool",
    "register",
]
