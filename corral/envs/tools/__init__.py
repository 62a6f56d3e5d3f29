"""Tools: Python functions that the model may call between its turns."""

from corral.envs.tools.environment import ToolsEnv

__all__ = ["ToolsEnv"]
