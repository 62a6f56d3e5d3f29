"""Scores any model on a recipe's held-out questions."""

from corral.loop.parts import build_player
from corral.loop.validate import show_samples, validate
from corral.observe.console import Console
from corral.recipe.schema import Recipe


def evaluate(recipe: Recipe, model_path: str | None, console: Console) -> dict[str, float]:
    player = build_player(recipe, console, model_path)
    try:
        result = validate(player, console)
    finally:
        player.close()
        console.close()
    console.validation(model_path or recipe.model.path, result.metrics, result.num_prompts)
    show_samples(player, result, console)
    return result.metrics
