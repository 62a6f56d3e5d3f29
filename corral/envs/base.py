"""The interface of environments. A single-turn question is one with one step.

An environment lives for one trajectory: `reset` once, `step` until done, `close` always. It sees and returns text;
tokens, masks and log-probabilities are the rollout driver's business, and so are deadlines and budgets.

Inherit `Env` and write `async def reset` and `async def step`; or, if they block, inherit `BlockingEnv` and write plain
functions, which run in processes of their own (`env_processes.py`). Everything else has a default. A class that
inherits neither is taken for what its methods say, and gets the same defaults (`as_env_class`).
"""

import inspect
import random
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from corral.data.rows import Message, Row
from corral.recipe.errors import UserError


@dataclass(frozen=True)
class StepResult:
    messages: list[Message]
    """What the model sees next; nothing when done."""
    reward: float
    """The reward of this step."""
    done: bool
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers that are summed over the steps of a trajectory."""
    error: str | None = None
    """What failed, if something did; the reward stands for it."""
    closing: str = ""
    """The end of the last message, which stays when the rest is cut to `rollout.max_observation_tokens`."""
    state: str | None = None
    """The state that the model is in now: equal texts are equal states. None: the messages say it."""


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
    """Another environment behind the same interface, for subclasses to change some of it."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.copy_attributes()

    def copy_attributes(self) -> None:
        """Take over the attributes; to be called again after `reset`, which may have set them."""
        for name in ("bounds_itself", "inline", "last_turns", "tools"):
            setattr(self, name, getattr(self.env, name))

    def count_turn(self, num_before: int, num_generated: int, is_cut: bool) -> None:
        self.env.count_turn(num_before, num_generated, is_cut)

    def was_shown(self, messages: list[Message]) -> None:
        self.env.was_shown(messages)

    def state(self) -> str:
        return str(self.env.first_state())

    def summary(self) -> dict[str, float]:
        return dict(self.env.summary())

    def random_reply(self, rng: random.Random) -> Any:
        return self.env.random_reply(rng)

    def best_reply(self) -> Any:
        return self.env.best_reply()

    def has_policy(self, method: str) -> bool:
        return bool(self.env.has_policy(method))


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


def is_blocking(env_class: type) -> bool:
    return issubclass(env_class, BlockingEnv)
