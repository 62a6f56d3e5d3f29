"""From the recipe's environments to something that makes one for each trajectory."""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from corral.data.plugins import did_you_mean, is_spec, load_object
from corral.data.rows import Row
from corral.envs.base import Env, Shared
from corral.recipe.errors import UserError
from corral.recipe.schema import Environment, Rollout
from corral.rewards.pool import Rewards

BUILT_IN = {
    "question": "corral.envs.question:QuestionEnv",
    "frozen_lake": "corral.envs.games.frozen_lake:FrozenLakeEnv",
    "sokoban": "corral.envs.games.sokoban:SokobanEnv",
    "gymnasium": "corral.envs.gymnasium:GymnasiumEnv",
    "reasoning_gym": "corral.envs.reasoning_gym:ReasoningGymEnv",
    "search": "corral.envs.search:SearchEnv",
    "tools": "corral.envs.tools:ToolsEnv",
    "agent": "corral.envs.agent:AgentEnv",
}
METHODS = ("reset", "step", "close")


class EnvSet:
    """Makes environments, by the tag in the row where there are several. Has what they share, until `close`."""

    def __init__(
        self, environments: Mapping[str, Environment], pools: Mapping[str, Rewards], rollout: Rollout = Rollout()
    ) -> None:
        self.kinds: dict[str, Kind] = {}
        try:
            for tag, environment in environments.items():
                self.kinds[tag] = Kind.open(tag, environment, pools.get(tag), rollout)
        except BaseException:
            self.close()
            raise

    def kind_of(self, row: Row) -> "Kind":
        """That of the environment which plays the row."""
        if len(self.kinds) == 1:
            return next(iter(self.kinds.values()))
        return self.kinds[row.extra["environment"]]

    def close(self) -> None:
        for kind in self.kinds.values():
            kind.close()


@dataclass
class Kind:
    """One environment of the recipe, of which `make` makes one for each trajectory."""

    tag: str
    make: Callable[[], Env]
    timeout_s: float
    """For one reset or step."""
    on_error: float
    """Reward of a trajectory whose environment failed."""
    limit: asyncio.Semaphore | None
    """Trajectories that may be played at the same time. None: all."""
    shared: list[Shared] = field(default_factory=list)
    make_here: Callable[[], Env] | None = None
    """Of one that `make` makes in another process: in this one, for a debugger."""

    @classmethod
    def open(cls, tag: str, environment: Environment, pool: Rewards | None, rollout: Rollout) -> "Kind":
        """`options` are the class's arguments. A class that names one of the others below as an argument gets it."""
        made = find_class(environment.name)
        offered: dict[str, Any] = {
            "pool": pool,
            "max_turns": rollout.max_turns,
            "max_response_tokens": rollout.max_response_tokens,
            "timeout_s": environment.timeout_s,
        }
        shared: list[Shared] = []
        if hasattr(made, "open_shared"):
            asked = inspect.signature(made.open_shared).parameters
            given = {name: value for name, value in {**offered, **environment.options}.items() if name in asked}
            bind(made.open_shared, given, environment.name)
            shared.append(made.open_shared(**given))
            offered["shared"] = shared[0]
        parameters = inspect.signature(made).parameters
        arguments = {name: value for name, value in offered.items() if name in parameters} | environment.options
        kind = cls(
            tag=tag,
            make=lambda: made(**arguments),
            timeout_s=environment.timeout_s,
            on_error=environment.reward.on_error,
            limit=None if environment.concurrency is None else asyncio.Semaphore(environment.concurrency),
            shared=shared,
        )
        try:
            bind(made, arguments, environment.name)
            if environment.name in BUILT_IN and not is_blocking(made):
                made(**arguments)  # says what is wrong with its options now, and not in every trajectory
        except BaseException:
            kind.close()
            raise
        if is_blocking(made):
            from corral.envs.processes import BlockingEnv, EnvProcesses, ProcessEnv

            processes = EnvProcesses(environment.name, made, arguments, environment.processes, environment.timeout_s)
            kind.make, kind.make_here = lambda: ProcessEnv(processes), lambda: BlockingEnv(made(**arguments))
            # More would wait for a process while others wait for them to begin.
            kind.limit = asyncio.Semaphore(min(environment.processes, environment.concurrency or environment.processes))
            shared.append(processes)
        return kind

    def close(self) -> None:
        for shared in reversed(self.shared):
            with suppress(Exception):
                shared.close()


def find_class(name: str) -> Any:
    if name not in BUILT_IN and not is_spec(name):
        raise UserError(
            f"there is no environment `{name}`{did_you_mean(name, BUILT_IN)}; "
            f"there are {', '.join(BUILT_IN)} and `module:Class`"
        )
    found = load_object(BUILT_IN.get(name, name), "environment")
    if not isinstance(found, type):
        raise UserError(f"environment `{name}` is not a class")
    for method in METHODS:
        if not callable(getattr(found, method, None)):
            raise UserError(f"environment `{name}` must have a method `async def {method}`")
    if len({inspect.iscoroutinefunction(getattr(found, method)) for method in METHODS}) > 1:
        raise UserError(f"environment `{name}`: {', '.join(METHODS)} must all be `async def`, or none of them")
    return found


def is_blocking(made: Any) -> bool:
    return not inspect.iscoroutinefunction(made.step)


def uses_rewards(environment: Environment) -> bool:
    """Whether the recipe's reward function is asked, and so its processes are needed."""
    found = find_class(environment.name)
    asked = set(inspect.signature(found).parameters)
    if hasattr(found, "open_shared"):
        asked |= set(inspect.signature(found.open_shared).parameters)
    return "pool" in asked


def bind(function: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> None:
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise UserError(f"environment `{name}`: its options don't fit: {error}") from error
