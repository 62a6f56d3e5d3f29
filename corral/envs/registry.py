"""From the recipe's `environment` to something that makes environments."""

import inspect
from collections.abc import Callable

from corral.data.plugins import did_you_mean, is_spec, load_object
from corral.envs.base import Env
from corral.envs.question import QuestionEnv
from corral.recipe.errors import UserError
from corral.recipe.schema import Environment
from corral.rewards.pool import Rewards

BUILT_IN: dict[str, Callable[..., Env]] = {"question": QuestionEnv}


def make_env_factory(environment: Environment, pool: Rewards) -> Callable[[], Env]:
    """A function that makes a new environment for each trajectory.

    `options` are the class's arguments; a class with an argument `pool` gets the pool that runs the reward function.
    """
    make = _find(environment.name)
    arguments = dict(environment.options)
    if "pool" in inspect.signature(make).parameters:
        arguments["pool"] = pool
    try:
        inspect.signature(make).bind(**arguments)
    except TypeError as error:
        raise UserError(f"environment `{environment.name}`: its options don't fit: {error}") from error
    return lambda: make(**arguments)


def _find(name: str) -> Callable[..., Env]:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if not is_spec(name):
        known = ", ".join(BUILT_IN)
        raise UserError(
            f"there is no environment `{name}`{did_you_mean(name, BUILT_IN)}; there are {known} and `module:Class`"
        )
    found: Callable[..., Env] = load_object(name, "environment")
    if not isinstance(found, type):
        raise UserError(f"environment `{name}` is not a class")
    for method in ("reset", "step", "close"):
        if not inspect.iscoroutinefunction(getattr(found, method, None)):
            raise UserError(f"environment `{name}` must have a method `async def {method}`")
    return found
