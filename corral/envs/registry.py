"""From the recipe's environments to something that makes one for each trajectory."""

import asyncio
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from corral.data.plugins import did_you_mean, is_spec, load_object
from corral.data.rows import Row
from corral.envs import built_in
from corral.envs.base import Env, EnvDefaults, SharedResource, as_env_class, is_blocking
from corral.recipe.errors import UserError
from corral.recipe.schema import Environment, Rollout
from corral.rewards.scorer_pool import RewardScorer

RENAMED_OPTIONS = {"told_by": "tool_prompt"}
"""Options of `tools` and `agent` that had another name in earlier releases."""


class EnvSet:
    """Makes environments, by the tag in the row where there are several. Has what they share, until `close`."""

    def __init__(
        self, environments: Mapping[str, Environment], pools: Mapping[str, RewardScorer], rollout: Rollout = Rollout()
    ) -> None:
        self.factories: dict[str, EnvFactory] = {}
        try:
            for tag, environment in environments.items():
                self.factories[tag] = EnvFactory.open(tag, environment, pools.get(tag), rollout)
        except BaseException:
            self.close()
            raise

    def factory_for(self, row: Row) -> "EnvFactory":
        if len(self.factories) == 1:
            return next(iter(self.factories.values()))
        return self.factories[row.extra["environment"]]

    def close(self) -> None:
        for factory in self.factories.values():
            factory.close()


@dataclass
class EnvFactory:
    """One environment of the recipe, of which `make` makes one for each trajectory."""

    tag: str
    make: Callable[[], Env]
    timeout_s: float
    """Deadline of one reset or step."""
    on_error: float
    """Reward of a trajectory whose environment failed."""
    limit: asyncio.Semaphore | None
    """Bounds how many trajectories run at the same time. None: all do."""
    shared: list[SharedResource] = field(default_factory=list)
    make_in_process: Callable[[], Env] | None = None
    """Where `make` makes one in another process: makes it in this one, for a debugger."""

    @classmethod
    def open(cls, tag: str, environment: Environment, pool: RewardScorer | None, rollout: Rollout) -> "EnvFactory":
        """`options` are arguments of the class, of its `open_shared`, or of both. Either also gets those of the others
        below that it names."""
        env_class = find_class(environment.name)
        offered: dict[str, Any] = {
            "pool": pool,
            "max_turns": rollout.max_turns,
            "max_response_tokens": rollout.max_response_tokens,
            "timeout_s": environment.timeout_s,
        }
        for_shared = inspect.signature(env_class.open_shared).parameters
        given = {name: value for name, value in {**offered, **environment.options}.items() if name in for_shared}
        check_arguments(env_class.open_shared, given, environment.name)
        shared = env_class.open_shared(**given)
        if shared is not None:
            offered["shared"] = shared
        names = inspect.signature(env_class).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
        arguments = {name: value for name, value in offered.items() if name in names} | {
            name: value
            for name, value in environment.options.items()
            if takes_all or name in names or name not in for_shared
        }
        factory = cls(
            tag=tag,
            make=lambda: env_class(**arguments),
            timeout_s=environment.timeout_s,
            on_error=environment.reward.on_error,
            limit=None if environment.concurrency is None else asyncio.Semaphore(environment.concurrency),
            shared=[] if shared is None else [shared],
        )
        try:
            check_arguments(env_class, arguments, environment.name)
            if not is_spec(environment.name) and not is_blocking(env_class):
                factory.make()  # raises what is wrong with its options now, and not in every trajectory
            if is_blocking(env_class):
                factory._run_in_processes(env_class, environment, arguments)
        except BaseException:
            factory.close()
            raise
        return factory

    def _run_in_processes(self, env_class: Any, environment: Environment, arguments: dict[str, Any]) -> None:
        from corral.envs.env_processes import EnvProcesses, InProcessEnv, ProcessEnv

        num_processes = environment.processes
        processes = EnvProcesses(environment.name, env_class, arguments, num_processes, environment.timeout_s)
        self.shared.append(processes)
        self.make = lambda: ProcessEnv(processes)
        self.make_in_process = lambda: InProcessEnv(env_class(**arguments))
        # More would wait for a process while others wait for them to begin.
        self.limit = asyncio.Semaphore(min(num_processes, environment.concurrency or num_processes))

    def close(self) -> None:
        for shared in reversed(self.shared):
            with suppress(Exception):
                shared.close()


def built_in_names() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(built_in.__path__)]


def find_class(name: str) -> Any:
    """The environment's class, a subclass of `Env` or `BlockingEnv`."""
    if is_spec(name):
        found = load_object(name, "environment")
        if not isinstance(found, type):
            raise UserError(f"environment `{name}` is not a class")
        return as_env_class(found, name)
    if name not in (known := built_in_names()):
        raise UserError(
            f"there is no environment `{name}`{did_you_mean(name, known)}; "
            f"there are {', '.join(known)} and `module:Class`"
        )
    module = importlib.import_module(f"{built_in.__name__}.{name}")
    [env_class] = [
        one
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, EnvDefaults) and one.__module__ == module.__name__
    ]
    return env_class


def uses_rewards(environment: Environment) -> bool:
    """Whether the recipe's reward function is used, and so its processes are needed."""
    env_class = find_class(environment.name)
    return any("pool" in inspect.signature(made).parameters for made in (env_class, env_class.open_shared))


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> None:
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        renamed = "".join(f"; `{old}` is now `{new}`" for old, new in RENAMED_OPTIONS.items() if old in arguments)
        raise UserError(f"environment `{name}`: its options don't fit: {error}{renamed}") from error
