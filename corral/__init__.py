"""Reinforcement learning for language models. These are the names that a user's own code imports."""

from corral.algorithms.declarations import Needs as Needs
from corral.algorithms.declarations import advantage as advantage
from corral.algorithms.declarations import policy_loss as loss

__all__ = ["Needs", "advantage", "loss"]
