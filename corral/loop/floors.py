"""What random and optimal play would score on the held-out boards: the lines between which a score is read."""

import asyncio
from collections.abc import Mapping, Sequence

from corral.data.rows import Row
from corral.envs.agents import Floor, floors
from corral.envs.registry import EnvSet, find_class
from corral.recipe.schema import Recipe

MOST_ROWS = 1000


async def floor_metrics(recipe: Recipe, rows: Sequence[Row]) -> dict[str, float]:
    """`validation/random/...` (random) and `validation/optimal/...` (optimal) of reward and success, by tag where there
    are several environments. Nothing for environments that code cannot play."""
    playable = {
        tag: environment
        for tag, environment in recipe.tagged_environments.items()
        if any(hasattr(find_class(environment.name), player) for player in ("random_reply", "best_reply"))
    }
    own = [row for row in rows if len(recipe.tagged_environments) == 1 or row.extra.get("environment") in playable]
    if not own:
        return {}
    env_set = EnvSet(playable, {}, recipe.rollout)
    games = floors(env_set, own[:MOST_ROWS], recipe.rollout.max_turns, recipe.seed)
    try:
        found = await asyncio.to_thread(asyncio.run, games)  # solvers compute, and the event loop has others to serve
    finally:
        env_set.close()
    return as_metrics(found)


def as_metrics(found: Mapping[str, Floor | None]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for tag, floor in found.items():
        if floor is not None:
            where = f"{tag}/" if tag else ""
            values = {
                f"validation/random/{where}reward": floor.random_reward,
                f"validation/random/{where}success": floor.random_success,
                f"validation/optimal/{where}reward": floor.best_reward,
                f"validation/optimal/{where}success": floor.best_success,
            }
            metrics |= {name: value for name, value in values.items() if value is not None}
    return metrics
