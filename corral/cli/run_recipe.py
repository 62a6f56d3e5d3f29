"""Planning and training a loaded recipe, for the verbs `train`, `plan` and `migrate`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corral.recipe.errors import UserError

if TYPE_CHECKING:
    from corral.recipe.schema import Recipe
    from corral.runtime.local_debugger import Debugging

SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")

Shrink = Annotated[
    int | None,
    typer.Option(
        "--shrink",
        min=1,
        metavar="NODES",
        help="One step of a tiny model on tiny data, on so many nodes, to see that it runs.",
        show_default=False,
    ),
]
Debug = Annotated[
    bool, typer.Option("--debug", help="All in this process, on one device: breakpoint() opens a debugger.")
]
PostMortem = Annotated[
    bool, typer.Option("--post-mortem", help="Open a debugger where the run fails, on a cluster in the worker.")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Workers' debuggers, which have no password, listen on the network.")
]


def load_own_recipe(path: Path, overrides: Sequence[str]) -> "Recipe":
    from corral.recipe.load import load_recipe

    if path.suffix in SCRIPTS:
        raise UserError(f"{path} is a script; `corral migrate {path} > recipe.yaml` makes a recipe of it")
    return load_recipe(path, overrides)


def shrunk(recipe: "Recipe", num_nodes: int | None) -> "Recipe":
    from corral.loop.shrink import shrink

    return recipe if num_nodes is None else shrink(recipe, num_nodes)


def train_recipe(recipe: "Recipe", num_nodes: int | None, debugging: "Debugging") -> None:
    """Trains the recipe, or with `num_nodes` a shrunk one."""
    from corral.cli.planning import with_plan
    from corral.loop.shrink import prepare_index
    from corral.loop.train import train
    from corral.observe.console import Console
    from corral.recipe.plan import describe_batch, describe_schedule

    loaded, plan = with_plan(debugging.adapt(shrunk(recipe, num_nodes)))
    if num_nodes is not None:
        prepare_index(loaded)
    console = Console(live=not debugging.here)
    for warning in plan.warnings:
        console.warn(warning)
    with debugging.watching(loaded, console):
        train(loaded, plan.text(), [*describe_batch(plan), *describe_schedule(plan)], console, debugging)


def print_plan(recipe: "Recipe", num_nodes: int | None, as_json: bool) -> None:
    from corral.cli.planning import describe_services, with_plan

    loaded, plan = with_plan(shrunk(recipe, num_nodes))
    services = describe_services(loaded)
    if as_json:
        print(json.dumps({**plan.as_dict(), "services": services}, indent=2))
        return
    print(plan.text())
    if services:
        print("\n".join(["services", *(f"  {line}" for line in services)]))
