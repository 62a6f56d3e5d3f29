"""Recipe arguments of the command line, and the way from them to a checked recipe and its plan."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from corral.recipe.plan import Plan
    from corral.recipe.schema import Recipe

RecipeFile = Annotated[Path, typer.Argument(help="The recipe, a YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Changes to it: batch.prompts_per_step=16 optimizer.learning_rate=1e-5")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def planned(recipe: Path, overrides: Sequence[str] | None) -> "tuple[Recipe, Plan]":
    """Raises everything that is wrong with the recipe, before anything is loaded."""
    from corral.recipe.load import load_recipe

    return with_plan(load_recipe(recipe, overrides or []))


def with_plan(recipe: "Recipe") -> "tuple[Recipe, Plan]":
    from corral.api import checked_plan

    return recipe, checked_plan(recipe)


def describe_services(recipe: "Recipe") -> list[str]:
    """What runs beside the workers of every node; for a retriever, how large its index is, or will be."""
    lines = []
    for name, service in recipe.cluster.services.items():
        what = " ".join(service.command) if service.retriever is None else f"retriever of {service.retriever}"
        lines.append(f"{name}: {what}, on every node, at http://127.0.0.1:{service.port}")
        if service.retriever is not None:
            lines += [f"  {line}" for line in describe_index(Path(service.retriever), service.corpus)]
    return lines


def describe_index(index: Path, corpus: str | None) -> list[str]:
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
