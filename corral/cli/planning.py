"""From a recipe file to a checked recipe and its plan, for the verbs that need one."""

from collections.abc import Sequence
from pathlib import Path

from corral.recipe.load import load_recipe
from corral.recipe.plan import Plan, make_plan
from corral.recipe.schema import Recipe
from corral.recipe.shape import ModelShape


def planned(recipe: Path, overrides: Sequence[str]) -> tuple[Recipe, Plan]:
    """Everything that is wrong with the recipe is raised here, before anything is loaded."""
    return with_plan(load_recipe(recipe, overrides))


def with_plan(recipe: Recipe) -> tuple[Recipe, Plan]:
    return recipe, make_plan(recipe, ModelShape.find(recipe.model.path))


def services_in_words(recipe: Recipe) -> list[str]:
    """What runs beside the workers of every node; of a retriever, how large its index is, or will be."""
    lines = []
    for name, service in recipe.cluster.services.items():
        what = " ".join(service.command) if service.retriever is None else f"retriever of {service.retriever}"
        lines.append(f"{name}: {what}, on every node, at http://127.0.0.1:{service.port}")
        if service.retriever is not None:
            lines += [f"  {line}" for line in index_in_words(Path(service.retriever), service.corpus)]
    return lines


def index_in_words(index: Path, corpus: str | None) -> list[str]:
    from corral.retrieval.estimate import estimate, of_index
    from corral.retrieval.index import MANIFEST

    if (index.expanduser() / MANIFEST).is_file():
        return of_index(index.expanduser()).lines()
    if corpus is None:
        return ["not built yet; with the service's `corpus` this would say how large it will be"]
    build = f"corral retriever build {corpus} {index}"
    return [
        *estimate(Path(corpus).expanduser(), "bm25").lines(),
        f"not built yet: {build}",
        f"for an index of vectors: {build} --kind flat --encoder NAME --dry-run",
    ]
