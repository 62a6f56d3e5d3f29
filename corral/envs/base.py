"""The interface of environments, and what makes one for each trajectory. A single-turn question is one with one step.

An environment lives for one trajectory: `reset` once, `step` until done, `close` always. It sees and returns text;
tokens, masks and log-probabilities are the rollout driver's business, and so are deadlines and budgets.

Inherit `Env` and write `async def reset` and `async def step`; or, if they block, inherit `BlockingEnv` and write plain
functions, which run in processes of their own (`env_processes.py`). Everything else has a default. A class that
inherits neither is taken for what its methods say, and gets the same defaults (`as_env_class`).
"""

import asyncio
import importlib
import inspect
import pkgutil
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from corral.data.plugins import did_you_mean, error_line, is_spec, load_object
from corral.data.rows import Message, Row
from corral.envs import built_in
from corral.recipe.errors import UserError
from corral.rewards.reward_function import Score, reward_on_error
from corral.rewards.scorer_pool import RewardScorer

if TYPE_CHECKING:
    from corral.recipe.schema import Environment, Rollout

RENAMED_OPTIONS = {"told_by": "tool_prompt"}
"""Options of `tools` and `agent` that had another name in earlier releases."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class StepResult:
    messages: list[Message]
    """What the model sees next; nothing when done."""
    reward: float | None
    """The reward of this step. None: it has none, and so the trajectory is not trained on."""
    done: bool
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that are summed over the steps of a trajectory."""
    error: str | None = None
    """What failed, if something did; the reward stands for it."""
    tool_errors: list[str] = field(default_factory=list)
    """What tools raised in this step; the messages tell the model."""
    closing: str = ""
    """The end of the last message, which stays when the rest is cut to `rollout.max_observation_tokens`."""
    state: str | None = None
    """The state that the model is in now: equal texts are equal states. None: the messages say it."""
    score: Score | None = field(default=None, compare=False)
    """What the reward function returned for the trajectory, at its end (`final_step`)."""


class SharedResource(Protocol):
    """Something that all trajectories of a worker share, such as a client or a server."""

    def close(self) -> None: ...


class EnvDefaults:
    """Everything of an environment that has a default."""

    bounds_itself: bool = False
    """Whether it needs no deadline from outside."""
    inline: bool = False
    """Whether observations continue the model's own turn as text, instead of being new messages of a chat. Where the
    model has closed its turn, they come as a user's message all the same."""
    last_turns: int = 0
    """Turns beyond `rollout.max_turns` in which nothing but a final answer is wanted."""
    tools: Sequence[dict[str, Any]] = ()
    """Functions, as JSON schemas, that the chat template is to describe to the model; known after `reset`."""

    @classmethod
    def open_shared(cls, *args: Any, **kwargs: Any) -> SharedResource | None:
        """Opens what all trajectories of a worker share. It has options of its own, or the same ones as the
        constructor, which gets the result as its argument `shared`; it is closed at the end."""
        return None

    def count_turn(self, num_before: int, num_generated: int, is_cut: bool) -> None:
        """Called before each step: how many tokens were there, how many the model generated, and whether they were cut
        off at a limit. Not called for environments in processes."""

    def was_shown(self, messages: list[Message]) -> None:
        """Called with what the model gets to see of an observation that is longer than
        `rollout.max_observation_tokens` and was cut. Not called for environments in processes."""

    def state(self) -> str:
        """The state after `reset`; equal texts are equal states, as in `StepResult.state`. All samples of a prompt
        begin in the same one, whatever it is called."""
        return ""

    def first_state(self) -> str:
        """The state after `reset`, for the driver: a class may use the name `state` for something else."""
        return str(self.state()) if callable(self.state) else ""

    def summary(self) -> dict[str, float]:
        """Metrics of the whole trajectory, asked for once at its end, however it ended."""
        return {}

    def draw_frame(self) -> str | bytes | None:
        """The present state for people who look at the trajectory: text, or the bytes of a PNG file. Called after
        `reset` and after each step. None: there is nothing to draw."""
        return None

    def random_reply(self, rng: random.Random) -> str | Awaitable[str | None] | None:
        """The reply of a random policy in the present state, for the random baseline."""
        return None

    def best_reply(self) -> str | Awaitable[str | None] | None:
        """The reply of an optimal policy in the present state, for the optimal baseline. None: nobody knows it."""
        return None

    @classmethod
    def overrides(cls, method: str) -> bool:
        """Whether the class has its own `random_reply`, `best_reply`, ... instead of the default."""
        return getattr(cls, method) is not getattr(EnvDefaults, method)

    def has_policy(self, method: str) -> bool:
        """Whether there is a `random_reply` or `best_reply` for the baselines."""
        return self.overrides(method)


class Env(EnvDefaults):
    """An environment whose methods are `async` and never block."""

    async def reset(self, row: Row, seed: int) -> list[Message]:
        """Begin; returns the first messages the model sees. The row is the same for all samples of a prompt, the seed
        is the trajectory's own."""
        raise NotImplementedError

    async def step(self, reply: str) -> StepResult:
        """Take the model's reply."""
        raise NotImplementedError

    async def close(self) -> None:
        """Release everything; also called after a failure, and before `reset`."""


class BlockingEnv(EnvDefaults):
    """An environment whose methods are plain functions, because they block or compute; it runs in processes."""

    def reset(self, row: Row, seed: int) -> list[Message]:
        raise NotImplementedError

    def step(self, reply: str) -> StepResult:
        raise NotImplementedError

    def close(self) -> None:
        """Release everything; also called after a failure, and before `reset`."""


class EnvWrapper(Env):
    """Another environment behind the same interface, for subclasses to change `reset`, `step` and `close`."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.copy_attributes()

    def copy_attributes(self) -> None:
        """Take over attributes and methods; to be called again after `reset`, which may have set them."""
        for name in (
            "bounds_itself", "inline", "last_turns", "tools", "count_turn", "was_shown", "first_state", "summary",
            "draw_frame", "random_reply", "best_reply", "has_policy",
        ):  # fmt: skip
            setattr(self, name, getattr(self.env, name))


# --- from the recipe's environments to one for each trajectory


class EnvSet:
    """Makes environments, by the tag in the row where there are several. Has what they share, until `close`."""

    def __init__(
        self,
        environments: "Mapping[str, Environment]",
        pools: Mapping[str, RewardScorer],
        rollout: "Rollout",
        prints: Path | None = None,
    ) -> None:
        """`prints`: file for what environments in processes of their own print."""
        self.factories: dict[str, EnvFactory] = {}
        try:
            for tag, environment in environments.items():
                self.factories[tag] = EnvFactory(tag, environment, pools.get(tag), rollout, prints)
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


class EnvFactory:
    """One environment of the recipe, of which `make` makes one for each trajectory."""

    def __init__(
        self,
        tag: str,
        environment: "Environment",
        pool: RewardScorer | None,
        rollout: "Rollout",
        prints: Path | None = None,
    ) -> None:
        """`options` are arguments of the class, of its `open_shared`, or of both. Either also gets those of the others
        below that it names."""
        self.tag, self.pool, self.prints = tag, pool, prints
        self.timeout_s = environment.timeout_s
        """Deadline of one reset or step."""
        self.on_error = reward_on_error(environment.reward.on_error)
        """Reward of a trajectory whose environment failed. None: it is dropped."""
        self.env_class = env_class = find_class(environment.name)
        offered: dict[str, Any] = {
            "pool": pool,
            "max_turns": rollout.max_turns,
            "max_response_tokens": rollout.max_response_tokens,
            "timeout_s": environment.timeout_s,
            "num_processes": environment.processes,
            "passed_variables": environment.env,
        }
        for_shared = inspect.signature(env_class.open_shared).parameters
        given = {name: value for name, value in {**offered, **environment.options}.items() if name in for_shared}
        check_arguments(env_class.open_shared, given, environment.name)
        with options_of_built_in(environment.name):
            shared: SharedResource | None = env_class.open_shared(**given)
        self.shared = [] if shared is None else [shared]
        if shared is not None:
            offered["shared"] = shared
        names = inspect.signature(env_class).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
        arguments = {name: value for name, value in offered.items() if name in names} | {
            name: value
            for name, value in environment.options.items()
            if takes_all or name in names or name not in for_shared
        }
        self.make: Callable[[], Env] = lambda: env_class(**arguments)
        self.make_in_process: Callable[[], Env] | None = None
        """Where `make` makes one in another process: makes it in this one, for a debugger."""
        concurrency = environment.concurrency
        try:
            check_arguments(env_class, arguments, environment.name)
            if issubclass(env_class, BlockingEnv):
                self._run_in_processes(env_class, environment, arguments)
                # More would wait for a process while others wait for them to begin.
                concurrency = min(environment.processes, concurrency or environment.processes)
            elif "in_process" in names:
                self.make_in_process = lambda: env_class(**{**arguments, "in_process": True})
            if not is_spec(environment.name) and not issubclass(env_class, BlockingEnv):
                with options_of_built_in(environment.name):
                    self.make()  # raises what is wrong with its options now, and not in every trajectory
        except BaseException:
            self.close()
            raise
        self.limit = None if concurrency is None else asyncio.Semaphore(concurrency)
        """Bounds how many trajectories run at the same time. None: all do."""

    def _run_in_processes(self, env_class: Any, environment: "Environment", arguments: dict[str, Any]) -> None:
        from corral.envs.env_processes import EnvProcesses, InProcessEnv, ProcessEnv  # these import this module

        processes = EnvProcesses(environment, env_class, arguments, self.prints)
        self.shared.append(processes)
        self.make = lambda: ProcessEnv(processes)
        self.make_in_process = lambda: InProcessEnv(env_class(**arguments))

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


def as_env_class(found: type, name: str) -> Any:
    """The class as a subclass of `Env` or `BlockingEnv`; one that inherits neither gets a subclass that does, with the
    defaults behind its own attributes. UserError if it is no environment."""
    for method in ("reset", "step"):
        own = getattr(found, method, None)
        if not callable(own) or own in (getattr(Env, method), getattr(BlockingEnv, method)):
            raise UserError(f"environment `{name}` must have a method `async def {method}`")
    methods = [getattr(found, method) for method in ("reset", "step", "close") if hasattr(found, method)]
    base = Env if inspect.iscoroutinefunction(found.step) else BlockingEnv  # type: ignore[attr-defined]
    if len({inspect.iscoroutinefunction(method) for method in methods}) > 1:
        raise UserError(
            f"environment `{name}`: reset, step, close must all be `async def` (inherit `corral.Env`), or none of them "
            "(inherit `corral.BlockingEnv`)"
        )
    if issubclass(found, base):
        return found
    metaclass: Any = type(found)
    adapted = metaclass(found.__name__, (found, base), {"__doc__": found.__doc__, "__module__": found.__module__})
    adapted.__qualname__ = found.__qualname__
    return adapted


def uses_rewards(environment: "Environment") -> bool:
    """Whether the recipe's reward function is used, and so its processes are needed."""
    env_class = find_class(environment.name)
    return any("pool" in inspect.signature(made).parameters for made in (env_class, env_class.open_shared))


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> None:
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        renamed = "".join(f"; `{old}` is now `{new}`" for old, new in RENAMED_OPTIONS.items() if old in arguments)
        raise UserError(f"environment `{name}`: its options don't fit: {error}{renamed}") from error


@contextmanager
def options_of_built_in(name: str) -> Iterator[None]:
    """Turns what a built-in environment raises for an option of a wrong type into a UserError. An error in a class of
    the user's stays as it is, with its traceback."""
    try:
        yield
    except (TypeError, AttributeError, ValueError) as error:
        if is_spec(name):
            raise
        raise UserError(f"environment `{name}`: its options don't fit: {error_line(error)}") from error


# --- awaiting what users wrote


def final_step(score: Score) -> StepResult:
    """The end of a trajectory that the reward function has scored."""
    return StepResult([], score.reward, done=True, metrics=score.metrics, error=score.error, score=score)


async def without_exit(call: Awaitable[Answer]) -> Answer:
    """Awaits a user's code. If it calls `sys.exit`, that is an error of its own and ends neither event loop nor run."""
    try:
        return await call
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code})") from error


async def try_once(factory: EnvFactory, row: Row) -> str | None:
    """Calls an environment once, with a row and its answer as the reply; the reward function, too, where it is used.
    Returns what failed."""
    stage, env = "reset", None
    try:
        env = factory.make()
        timeout_s = inf if env.bounds_itself else factory.timeout_s
        await within(env.reset(row, 0), timeout_s, f"no answer within {timeout_s:g} s")
        stage = "step"
        result = await within(env.step(str(row.answer)), timeout_s, f"no answer within {timeout_s:g} s")
        if factory.pool is None or result.score is None or result.score.response is None:
            return result.error
        return (await factory.pool.score_group([result.score], row))[0].error
    except Exception as error:
        return f"{stage}: {error_line(error)}"
    finally:
        if env is not None:
            with suppress(Exception):
                await within(env.close(), factory.timeout_s)


async def within(call: Awaitable[Answer], timeout_s: float, late: str = "") -> Answer:
    """TimeoutError, with the text `late`, if it takes longer. A late call is not awaited: it may ignore its
    cancellation."""
    task = asyncio.ensure_future(without_exit(call))
    try:
        await asyncio.wait({task}, timeout=None if timeout_s == inf else timeout_s)
    finally:
        task.cancel()
    if not task.done():
        raise TimeoutError(late)
    return task.result()
