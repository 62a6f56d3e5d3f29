"""Roles for `corral train --debug`: reward functions and environments are called in this process, and nothing hurries
them. With --post-mortem besides, a debugger opens where they fail; otherwise that costs a sample, as ever."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from corral.data.rows import Message, Row
from corral.envs.base import Env, StepResult
from corral.recipe.schema import Recipe
from corral.rewards.here import RewardsHere
from corral.rewards.pools import Pools
from corral.runtime.roles import build_role, rewarded
from corral.runtime.rollout_worker import Player
from corral.runtime.terminal import open_at
from corral.runtime.worker import WorkerContext

HERE = "corral.runtime.debugged:build_here"
OPENED = "corral.runtime.debugged:build_opened"
"""The same, and a debugger opens where something fails."""


def build_here(role: str, site: WorkerContext, recipe: Recipe, resume_from: Path | None) -> Any:
    if role == "rewards":
        return Pools(rewarded(recipe), RewardsHere)
    made = build_role(role, site, recipe, resume_from)
    if isinstance(made, Player):
        for kind in made.driver.envs.kinds.values():
            kind.timeout_s = math.inf
            if kind.make_here is not None:
                kind.make, kind.limit = kind.make_here, None
    return made


def build_opened(role: str, site: WorkerContext, recipe: Recipe, resume_from: Path | None) -> Any:
    if role == "rewards":
        return Pools(rewarded(recipe), lambda reward: RewardsHere(reward, on_error=open_at))
    made = build_here(role, site, recipe, resume_from)
    if isinstance(made, Player):
        for kind in made.driver.envs.kinds.values():
            kind.make = partial(Opened, kind.make)
    return made


class Opened:
    """An environment, with a debugger for what it raises."""

    def __init__(self, make_env: Callable[[], Env]) -> None:
        with opening():
            self.env = make_env()

    def __getattr__(self, name: str) -> Any:
        """What else an environment may have (see `envs/base.py`) is its own."""
        return getattr(self.env, name)

    async def reset(self, row: Row, seed: int) -> list[Message]:
        with opening():
            return await self.env.reset(row, seed)

    async def step(self, reply: str) -> StepResult:
        with opening():
            return await self.env.step(reply)

    async def close(self) -> None:
        with opening():
            await self.env.close()


class opening:
    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            open_at(error)
