"""Scores any model on a recipe's held-out questions."""

import asyncio

from corral.loop.closing import close_runner
from corral.loop.components import open_rollout_components
from corral.loop.validation import show_samples, validate
from corral.observe.console import Console
from corral.recipe.schema import Recipe


def evaluate(recipe: Recipe, model_path: str | None, console: Console) -> dict[str, float]:
    runner = asyncio.Runner()
    try:
        return runner.run(_evaluate(recipe, model_path, console))
    finally:
        console.close()
        close_runner(runner)


async def _evaluate(recipe: Recipe, model_path: str | None, console: Console) -> dict[str, float]:
    async with open_rollout_components(recipe, console, model_path) as players:
        result = await validate(players, console)
    console.validation(model_path or recipe.model.path, result.metrics, result.num_prompts, result.noun)
    show_samples(players, result, console)
    return result.metrics
