"""Corral trains language models and agents with reinforcement learning, from a laptop CPU to a cluster of GPU nodes.

The public API; everything else is private and may change. What is imported is loaded when it is first used, because the
processes that run reward functions import this package too and need no torch.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from corral.algorithms.declarations import Needs, advantage
    from corral.algorithms.declarations import policy_loss as loss
    from corral.api import Run, evaluate, load_recipe, plan, reward, train
    from corral.data.batch import Trajectory
    from corral.envs.base import BlockingEnv, Env, StepResult, final_step
    from corral.recipe.errors import RecipeError, RunError, UserError
    from corral.recipe.plan import Plan
    from corral.recipe.schema import Recipe

_HOMES = {
    "corral.algorithms.declarations": ("Needs", "advantage", "policy_loss"),
    "corral.api": ("Run", "evaluate", "load_recipe", "plan", "reward", "train"),
    "corral.data.batch": ("Trajectory",),
    "corral.envs.base": ("BlockingEnv", "Env", "StepResult", "final_step"),
    "corral.recipe.errors": ("RecipeError", "RunError", "UserError"),
    "corral.recipe.plan": ("Plan",),
    "corral.recipe.schema": ("Recipe",),
}
_HOME_OF = {name: (module, name) for module, names in _HOMES.items() for name in names}
_HOME_OF["loss"] = _HOME_OF.pop("policy_loss")

__all__ = [
    "BlockingEnv",
    "Env",
    "Needs",
    "Plan",
    "Recipe",
    "RecipeError",
    "Run",
    "RunError",
    "StepResult",
    "Trajectory",
    "UserError",
    "advantage",
    "evaluate",
    "final_step",
    "load_recipe",
    "loss",
    "plan",
    "reward",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("corral")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'corral' has no attribute {name!r}")
    module, attribute = _HOME_OF[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__
