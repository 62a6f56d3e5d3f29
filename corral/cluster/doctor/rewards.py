"""How long the recipe's reward function takes, and whether it takes what it will be given: called as a run calls it, in
processes with deadlines."""

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from corral.cluster.doctor.findings import Finding
from corral.data.rows import Row
from corral.envs.registry import EnvSet, uses_rewards
from corral.recipe.errors import UserError
from corral.recipe.plan import Plan, num_trajectories
from corral.recipe.schema import Environment
from corral.rewards.scorer_pool import ScorerPool

NUM_ROWS = 4
BUDGET_S = 30.0
"""For all calls, and for what a step may spend on rewards before it is worth a word."""
WRONG = "I do not know, but I guess "
"""How a reply begins that is as long as a reply can be."""
CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True)
class Call:
    seconds: float
    reward: float
    error: str | None
    is_answer: bool
    """The reply was the row's own answer."""


@dataclass(frozen=True)
class Trial:
    calls: tuple[Call, ...]
    load_s: float = 0.0
    error: str = ""
    """It could not be loaded."""


def try_reward(environment: Environment, rows: Sequence[Row], max_tokens: int) -> Trial:
    """Each row with its own answer, and with a long reply that is wrong."""
    began = time.monotonic()
    pool = None
    try:
        if not uses_rewards(environment):
            EnvSet({"": environment}, {}).close()
            return Trial(())
        pool = ScorerPool(environment.reward)
        EnvSet({"": environment}, {"": pool}).close()
        pool.check()
        load_s = time.monotonic() - began
        return Trial(asyncio.run(score_all(pool, rows, max_tokens)), load_s)
    except UserError as error:
        return Trial((), error=str(error))
    finally:
        if pool is not None:
            pool.close()


async def score_all(pool: ScorerPool, rows: Sequence[Row], max_tokens: int) -> tuple[Call, ...]:
    deadline, calls = time.monotonic() + BUDGET_S, []
    long = (WRONG * (max_tokens * CHARACTERS_PER_TOKEN // len(WRONG) + 1))[: max_tokens * CHARACTERS_PER_TOKEN]
    for row in rows:
        for reply in (str(row.answer), long):
            if time.monotonic() < deadline:
                began = time.monotonic()
                score = await pool.score(reply, row)
                calls.append(Call(time.monotonic() - began, score.reward, score.error, reply is not long))
    return tuple(calls)


def check_reward(trial: Trial, plan: Plan, tag: str = "") -> Iterator[Finding]:
    reward = plan.recipe.tagged_environments[tag].reward
    name = f"`{reward.name}`"
    if trial.error:
        yield Finding(
            "error", "reward", trial.error, "`environment.reward` and `environment.name` must load on every node"
        )
        return
    if not trial.calls:
        return
    failed = [call for call in trial.calls if call.error]
    if failed:
        what = f"{name} failed in {len(failed)} of {len(trial.calls)} calls: {failed[0].error}"
        yield Finding(
            "error" if len(failed) == len(trial.calls) else "warning", "reward", what, "make it take such replies"
        )
    usual, most = statistics.mean(call.seconds for call in trial.calls), max(call.seconds for call in trial.calls)
    workers = reward.workers * len(plan.placement.roles["rollout"])
    step_s = usual * num_trajectories(plan.recipe) / workers
    calls = f"{num_trajectories(plan.recipe)} calls a step in {workers} process{'es' * (workers > 1)}"
    words = f"{name} takes {duration(usual)} a call; {calls}"
    if most > reward.timeout_s / 2 and not any(call.error for call in trial.calls):
        what = f"{name} took {duration(most)} for one call, and is killed after {reward.timeout_s:g} s"
        yield Finding("warning", "reward", what, "raise `environment.reward.timeout_s`, or make it faster")
    if step_s > BUDGET_S:
        fix = "raise `environment.reward.workers`, or make it faster"
        yield Finding("warning", "reward", f"{words}: {duration(step_s)}", fix)
    elif not failed:
        yield Finding("ok", "reward", f"{words}: {duration(step_s)}")
    right = [call.reward for call in trial.calls if call.is_answer and not call.error]
    wrong = [call.reward for call in trial.calls if not call.is_answer and not call.error]
    if right and wrong and max(right) <= min(wrong):
        what = f"{name} gives the rows' own answers no more ({max(right):g}) than a wrong reply ({min(wrong):g})"
        yield Finding("note", "reward", what, "fine if it does not compare with the answer, or wants a form around it")


def duration(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
