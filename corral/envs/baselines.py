"""Random and optimal baselines: the scores of two policies that are code, between which a model's score is read."""

import asyncio
import inspect
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from corral.data.rows import Row
from corral.envs.base import Env, EnvSet

BUDGET_S = 60.0
"""Time for the episodes of a baseline: an environment that hangs must not hold up a run by more than this and one
deadline."""

PolicyName = Literal["random_reply", "best_reply"]
"""The environment's method that replies to its present state."""


@dataclass(frozen=True)
class EpisodeResult:
    reward: float
    turns: int
    success: float | None
    """None: the environment's summary does not say."""


@dataclass(frozen=True)
class Baseline:
    """Mean scores over rows; None where the environment has no such policy."""

    random_reward: float | None = None
    random_success: float | None = None
    best_reward: float | None = None
    best_success: float | None = None


async def baselines(env_set: EnvSet, rows: Sequence[Row], max_turns: int, seed: int = 0) -> dict[str, Baseline]:
    """Baselines by tag, over the rows of each environment."""
    found = {}
    for tag, factory in env_set.factories.items():
        own_rows = [row for row in rows if env_set.factory_for(row) is factory]
        found[tag] = await baseline_of(factory.make, own_rows, max_turns, seed, factory.timeout_s)
    return found


async def baseline_of(
    make: Callable[[], Env], rows: Sequence[Row], max_turns: int, seed: int, timeout_s: float
) -> Baseline:
    """Means over all rows, or those that were done when `BUDGET_S` was over. Episodes that fail are left out: an
    environment that does so now and then is no reason to do without a baseline."""
    results: dict[PolicyName, list[EpisodeResult | None]] = {"random_reply": [], "best_reply": []}
    deadline = time.monotonic() + BUDGET_S
    for number, row in enumerate(rows, start=seed * len(rows)):
        if time.monotonic() > deadline:
            break
        for policy, episodes in results.items():
            with suppress(Exception, SystemExit):
                episode = run_episode(make, row, number, max_turns, policy)
                episodes.append(await asyncio.wait_for(episode, timeout_s))
    return Baseline(*means(results["random_reply"]), *means(results["best_reply"]))


async def run_episode(
    make: Callable[[], Env], row: Row, seed: int, max_turns: int, policy: PolicyName
) -> EpisodeResult | None:
    """An episode in which the environment's own policy replies until it has no reply. None: there is no such policy, or
    no optimal one for this row."""
    env, rng, reward, turns = make(), random_policy_rng(seed), 0.0, 0
    try:
        if not env.has_policy(policy):
            return None
        await env.reset(row, seed)
        while turns < max_turns:
            reply = await reply_of(env.random_reply(rng) if policy == "random_reply" else env.best_reply())
            if reply is None:
                break
            result = await env.step(reply)
            reward, turns = reward + (result.reward or 0.0), turns + 1
            if result.done:
                break
        success = env.summary().get("success")
    finally:
        await env.close()
    return EpisodeResult(reward, turns, success) if turns or policy == "random_reply" else None


def random_policy_rng(seed: int) -> random.Random:
    return random.Random(f"player {seed}")  # other numbers than those the environment may draw from the same seed


async def reply_of(reply: Any) -> Any:
    """The reply itself, which has to be awaited where the environment is in another process."""
    return await reply if inspect.isawaitable(reply) else reply


def means(results: Sequence[EpisodeResult | None]) -> tuple[float | None, float | None]:
    """Mean reward and mean success."""
    episodes = [one for one in results if one is not None]
    successes = [one.success for one in episodes if one.success is not None]
    if not episodes:
        return None, None
    return fmean(one.reward for one in episodes), fmean(successes) if successes else None
