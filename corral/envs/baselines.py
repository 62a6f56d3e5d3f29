"""Random and optimal baselines: the scores of two policies that are code, between which a model's score is read."""

import asyncio
import inspect
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from corral.data.rows import Row
from corral.envs.base import Env, EnvSet

BUDGET_S = 60.0
"""Time for the episodes of a baseline: an environment that hangs must not hold up a run by more than this and one
deadline."""

Policy = Callable[[Env], Any]
"""The reply to the environment's present state. None: there is none."""


@dataclass(frozen=True)
class EpisodeResult:
    reward: float
    success: float | None
    """None: the environment's summary does not say."""
    turns: int
    summary: dict[str, float]


@dataclass(frozen=True)
class Baseline:
    """Mean scores over rows; None where the environment has no such policy."""

    random_reward: float | None = None
    random_success: float | None = None
    best_reward: float | None = None
    best_success: float | None = None


async def run_random(make: Callable[[], Env], row: Row, seed: int, max_turns: int) -> EpisodeResult | None:
    """An episode with the environment's random policy; None if it has none."""
    rng = random_policy_rng(seed)
    return await run_episode(make, row, seed, max_turns, "random_reply", lambda env: env.random_reply(rng))


async def run_optimal(make: Callable[[], Env], row: Row, seed: int, max_turns: int) -> EpisodeResult | None:
    """An episode with the environment's optimal policy; None if it has none, or not for this row."""
    result = await run_episode(make, row, seed, max_turns, "best_reply", lambda env: env.best_reply())
    return None if result is None or not result.turns else result


def random_policy_rng(seed: int) -> random.Random:
    return random.Random(f"player {seed}")  # other numbers than those the environment may draw from the same seed


async def run_episode(
    make: Callable[[], Env], row: Row, seed: int, max_turns: int, method: str, policy: Policy
) -> EpisodeResult | None:
    """An episode in which `policy`, the environment's own `method`, replies until it has no reply."""
    env = make()
    if not env.has_policy(method):
        return None
    reward, turns = 0.0, 0
    try:
        await env.reset(row, seed)
        while turns < max_turns and (reply := await reply_of(policy(env))) is not None:
            result = await env.step(reply)
            reward, turns = reward + result.reward, turns + 1
            if result.done:
                break
        summary = env.summary()
    finally:
        await env.close()
    return EpisodeResult(reward, summary.get("success"), turns, summary)


async def reply_of(reply: Any) -> Any:
    """The reply itself, which has to be awaited where the environment is in another process."""
    return await reply if inspect.isawaitable(reply) else reply


async def baselines(env_set: EnvSet, rows: Sequence[Row], max_turns: int, seed: int = 0) -> dict[str, Baseline | None]:
    """Baselines by tag, over the rows of each environment; None for environments without policies."""
    found: dict[str, Baseline | None] = {}
    for tag, factory in env_set.factories.items():
        own_rows = [row for row in rows if env_set.factory_for(row) is factory]
        baseline = await baseline_of(factory.make, own_rows, max_turns, seed, factory.timeout_s)
        found[tag] = None if baseline == Baseline() else baseline
    return found


async def baseline_of(
    make: Callable[[], Env], rows: Sequence[Row], max_turns: int, seed: int, timeout_s: float
) -> Baseline:
    """Means over all rows, or those that were done when `BUDGET_S` was over. Episodes that fail are left out."""
    at_random, optimal, deadline = [], [], time.monotonic() + BUDGET_S
    for number, row in enumerate(rows, start=seed * len(rows)):
        if time.monotonic() > deadline:
            break
        at_random.append(await in_time(run_random(make, row, number, max_turns), timeout_s))
        optimal.append(await in_time(run_optimal(make, row, number, max_turns), timeout_s))
    return Baseline(*means(at_random), *means(optimal))


async def in_time(episode: Coroutine[Any, Any, EpisodeResult | None], timeout_s: float) -> EpisodeResult | None:
    """None if it fails: an environment that does so now and then is no reason to do without a baseline."""
    try:
        return await asyncio.wait_for(episode, timeout_s)
    except (Exception, SystemExit):
        return None


def means(results: Sequence[EpisodeResult | None]) -> tuple[float | None, float | None]:
    """Mean reward and mean success."""
    episodes = [one for one in results if one is not None]
    successes = [one.success for one in episodes if one.success is not None]
    if not episodes:
        return None, None
    return fmean(one.reward for one in episodes), fmean(successes) if successes else None
