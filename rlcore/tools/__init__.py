"""Tools that a model may call; imports little, since tool processes start with it."""

from rlcore.tools.functions import ToolAnswer, function_tool

__all__ = ["ToolAnswer", "function_tool"]
