"""Sessions: agent loops, the worker that runs them, and what it stores."""

from rlcore.agent_loop.base import AgentLoopBase, register
from rlcore.agent_loop.single_turn import SingleTurnAgentLoop

__all__ = ["AgentLoopBase", "SingleTurnAgentLoop", "register"]
