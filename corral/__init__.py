"""Reinforcement learning of language models. What code of one's own is written against is here: environments."""

from corral.envs.base import BlockingEnv, Env, StepResult

__all__ = ["BlockingEnv", "Env", "StepResult"]
