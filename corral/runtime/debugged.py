"""Roles for `corral train --debug`: reward functions and environments are called in this process, and nothing hurries
them. With --post-mortem besides, a debugger opens where they fail; otherwise that costs a sample, as ever."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from corral.data.rows import Message, Row
from corral.envs.base import Env, EnvWrapper, StepResult
from corral.recipe.schema import Recipe
from corral.rewards.scorer_pool import InProcessScorer, ScorerPools
from corral.runtime.rollout_worker import Player
from corral.runtime.roles import build_role, rewarded
from corral.runtime.rollout_worker import Player
from corral.runtime.terminal import open_at
from corral.runtime.worker import WorkerContext

HERE = "corral.runtime.debugged:build_here"
OPENED = "corral.runtime.debugged:build_opened"
"""The same, and a debugger opens where something fails."""


def build_here(role: str, site: WorkerContext, recipe: Recipe, resume_from: Path | None) -> Any:
    if role == "rewards":
        return ScorerPools({tag: InProcessScorer(one.reward) for tag, one in rewarded(recipe).items()})
    made = build_role(role, site, recipe, resume_from)
    if isinstance(made, Player):
        for factory in made.driver.envs.factories.values():
            factory.timeout_s = math.inf
            if factory.make_in_process is not None:
                factory.make, factory.limit = factory.make_in_process, None
    return made


def build_opened(role: str, site: WorkerContext, recipe: Recipe, resume_from: Path | None) -> Any:
    if role == "rewards":
        return ScorerPools({tag: InProcessScorer(one.reward, open_at) for tag, one in rewarded(recipe).items()})
    made = build_here(role, site, recipe, resume_from)
    if isinstance(made, Player):
        for factory in made.driver.envs.factories.values():
            factory.make = partial(Opened, factory.make)
    return made


class Opened(EnvWrapper):
    """An environment, with a debugger for what it raises."""

    def __init__(self, make_env: Callable[[], Env]) -> None:
        with opening():
            super().__init__(make_env())

    async def reset(self, row: Row, seed: int) -> list[Message]:
        with opening():
            messages: list[Message] = await self.env.reset(row, seed)
        self.copy_attributes()
        return messages

    async def step(self, reply: str) -> StepResult:
        with opening():
            result: StepResult = await self.env.step(reply)
        return result

    async def close(self) -> None:
        with opening():
            await self.env.close()


class opening:
    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            open_at(error)
