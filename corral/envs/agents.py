"""Players that are code, a random one and the best one: their scores are an environment's floor and ceiling."""

import asyncio
import inspect
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from corral.data.rows import Row
from corral.envs.base import Env, summary_of
from corral.envs.registry import EnvSet

BUDGET_S = 60.0
"""For the games of a floor: an environment that hangs must not hold up a run by more than this and one deadline."""


@dataclass(frozen=True)
class RolloutResult:
    reward: float
    success: float | None
    """None: the environment does not tell."""
    turns: int
    summary: dict[str, float]


@dataclass(frozen=True)
class Floor:
    """Means over boards; None where the environment has no such player."""

    random_reward: float | None = None
    random_success: float | None = None
    best_reward: float | None = None
    best_success: float | None = None


async def play_random(make: Callable[[], Env], row: Row, seed: int, max_turns: int) -> RolloutResult | None:
    """None: it can't be played at random."""
    rng = random.Random(f"player {seed}")  # not the numbers that the environment may draw from the same seed
    return await play(make, row, seed, max_turns, "random_reply", rng)


async def play_best(make: Callable[[], Env], row: Row, seed: int, max_turns: int) -> RolloutResult | None:
    """None: nobody knows the best play."""
    played = await play(make, row, seed, max_turns, "best_reply")
    return None if played is None or not played.turns else played


async def play(
    make: Callable[[], Env], row: Row, seed: int, max_turns: int, player: str, *arguments: Any
) -> RolloutResult | None:
    """With the environment's method `player` for every turn, until it has nothing to say; None if there is none."""
    env: Any = make()
    if not has_player(env, player):
        return None
    reward, turns = 0.0, 0
    try:
        await env.reset(row, seed)
        while turns < max_turns and (said := await answered(getattr(env, player)(*arguments))) is not None:
            result = await env.step(said)
            reward, turns = reward + result.reward, turns + 1
            if result.done:
                break
        summary = summary_of(env)
    finally:
        await env.close()
    return RolloutResult(reward, summary.get("success"), turns, summary)


async def floors(env_set: EnvSet, rows: Sequence[Row], max_turns: int, seed: int = 0) -> dict[str, Floor | None]:
    """By tag, over the rows of each; None for environments that code can't play. Games that fail are left out."""
    found: dict[str, Floor | None] = {}
    for tag, kind in env_set.kinds.items():
        its_rows = [row for row in rows if env_set.kind_of(row) is kind]
        floor = await floor_of(kind.make, its_rows, max_turns, seed, kind.timeout_s)
        found[tag] = None if floor == Floor() else floor
    return found


async def floor_of(make: Callable[[], Env], rows: Sequence[Row], max_turns: int, seed: int, timeout_s: float) -> Floor:
    """Over all rows, or those that were played when `BUDGET_S` was over."""
    at_random, best, deadline = [], [], time.monotonic() + BUDGET_S
    for number, row in enumerate(rows, start=seed * len(rows)):
        if time.monotonic() > deadline:
            break
        at_random.append(await in_time(play_random(make, row, number, max_turns), timeout_s))
        best.append(await in_time(play_best(make, row, number, max_turns), timeout_s))
    return Floor(*means(at_random), *means(best))


async def in_time(game: Coroutine[Any, Any, RolloutResult | None], timeout_s: float) -> RolloutResult | None:
    """None if it fails: an environment that does so now and then is no reason to do without a floor."""
    try:
        return await asyncio.wait_for(game, timeout_s)
    except (Exception, SystemExit):
        return None


def means(played: Sequence[RolloutResult | None]) -> tuple[float | None, float | None]:
    """Of reward and success."""
    games = [one for one in played if one is not None]
    successes = [one.success for one in games if one.success is not None]
    if not games:
        return None, None
    return fmean(one.reward for one in games), fmean(successes) if successes else None


def has_player(env: Any, method: str) -> bool:
    """One that is played in a process says by its class what it can."""
    return hasattr(getattr(env, "made", env), method)


async def answered(said: Any) -> Any:
    """From an environment that is played in a process, an answer has to be waited for."""
    return await said if inspect.isawaitable(said) else said
