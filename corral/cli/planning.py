"""From a recipe file to a checked recipe and its plan, for the verbs that need one."""

from collections.abc import Callable, Sequence
from pathlib import Path

from corral.recipe.load import load_recipe
from corral.recipe.plan import Plan, make_plan
from corral.recipe.schema import Recipe
from corral.recipe.shape import ModelShape


def planned(
    recipe: Path, overrides: Sequence[str], adapt: Callable[[Recipe], Recipe] = lambda recipe: recipe
) -> tuple[Recipe, Plan]:
    """Everything that is wrong with the recipe is raised here, before anything is loaded. `adapt`: changes it first."""
    loaded = adapt(load_recipe(recipe, overrides))
    return loaded, make_plan(loaded, ModelShape.find(loaded.model.path))
