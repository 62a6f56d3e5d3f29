"""The debugger of `corral train --debug`: on the terminal, for what runs in this process.

It is Python's own, with two differences. Its `quit` ends the run, where Python's would raise an error that counts as
one of the environment or reward function it was in. And Ctrl-C opens it where the program is, also before any
breakpoint. Reward functions and environments are called in this process, without deadlines; with --post-mortem besides,
a debugger opens where they fail, which otherwise costs a sample, as ever.
"""

import math
import pdb
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from corral.data.rows import Message, Row
from corral.envs.base import Env, StepResult
from corral.recipe.schema import Recipe
from corral.rewards.here import RewardsHere
from corral.rewards.pools import Pools
from corral.runtime.rollout_worker import RolloutWorker
from corral.runtime.worker import RewardWorker, Role, WorkerContext, build_role, environments_with_rewards

DEBUG_BUILDER = "corral.runtime.local_debugger:build_debug_role"
POST_MORTEM_BUILDER = "corral.runtime.local_debugger:build_post_mortem_role"


class Debugger(pdb.Pdb):
    """pdb, whose `quit` raises KeyboardInterrupt."""

    thread: threading.Thread | None = None
    """Thread that waits for the user now."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options.pop("mode", None)  # from Python 3.14 on; `quit` would end the process
        super().__init__(*arguments, **{**options, "nosigint": True})

    def interaction(self, *arguments: Any) -> None:
        """Runs until the user says how to go on. KeyboardInterrupt after `quit`."""
        Debugger.thread = threading.current_thread()
        try:
            super().interaction(*arguments)
        finally:
            Debugger.thread = None
        if self.quitting:
            raise KeyboardInterrupt


@contextmanager
def debugger_installed() -> Iterator[None]:
    """For the time of the block `breakpoint()` and `pdb.set_trace()` open ours; what $PYTHONBREAKPOINT names, if it is
    set, is the user's choice and stays."""
    before, pdb.Pdb = pdb.Pdb, Debugger  # type: ignore[misc]
    try:
        yield
    finally:
        pdb.Pdb = before  # type: ignore[misc]


def break_on_signal(number: int, frame: FrameType | None) -> None:
    """Handles Ctrl-C: opens the debugger. At the prompt it discards what was typed, as usual."""
    if Debugger.thread is None:
        Debugger().set_trace(frame)
    elif Debugger.thread is threading.current_thread():
        raise KeyboardInterrupt


def open_at_error(error: BaseException) -> None:
    """Opens the debugger in the frame that raised it. KeyboardInterrupt after `quit`."""
    while error.__cause__ is not None:
        error = error.__cause__
    print(f"{type(error).__name__}: {error}")
    debugger = Debugger()
    debugger.reset()
    debugger.interaction(None, error.__traceback__)


# --- roles in this process


def build_debug_role(role: str, context: WorkerContext, recipe: Recipe, resume_from: Path | None) -> Role:
    if role == "rewards":
        return RewardWorker(Pools(environments_with_rewards(recipe), RewardsHere))
    built = build_role(role, context, recipe, resume_from)
    if isinstance(built, RolloutWorker):
        for kind in built.driver.envs.kinds.values():
            kind.timeout_s = math.inf
            if kind.make_here is not None:
                kind.make, kind.limit = kind.make_here, None
    return built


def build_post_mortem_role(role: str, context: WorkerContext, recipe: Recipe, resume_from: Path | None) -> Role:
    if role == "rewards":
        make_rewards = partial(RewardsHere, on_error=open_at_error)
        return RewardWorker(Pools(environments_with_rewards(recipe), make_rewards))
    built = build_debug_role(role, context, recipe, resume_from)
    if isinstance(built, RolloutWorker):
        for kind in built.driver.envs.kinds.values():
            kind.make = partial(DebuggedEnv, kind.make)
    return built


class DebuggedEnv:
    """An environment, with a debugger for what it raises."""

    def __init__(self, make_env: Callable[[], Env]) -> None:
        with post_mortem():
            self.env = make_env()

    def __getattr__(self, name: str) -> Any:
        """What else an environment may have (see `envs/base.py`) is its own."""
        return getattr(self.env, name)

    async def reset(self, row: Row, seed: int) -> list[Message]:
        with post_mortem():
            return await self.env.reset(row, seed)

    async def step(self, reply: str) -> StepResult:
        with post_mortem():
            return await self.env.step(reply)

    async def close(self) -> None:
        with post_mortem():
            await self.env.close()


class post_mortem:
    """Opens the debugger for what is raised in the block. A class: the frame of a generator would be in the way."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            open_at_error(error)
