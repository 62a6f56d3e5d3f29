"""Recipe arguments of the command line, and the way from them to a checked recipe, its plan and its training."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from corral.cli.chinese import add_chinese
from corral.recipe.errors import UserError

if TYPE_CHECKING:
    from corral.recipe.plan import Plan
    from corral.recipe.schema import Recipe
    from corral.runtime.local_debugger import Debugging


def examples(*commands: str) -> str:
    """The end of a command's help. Blank lines keep what comes before and after them on lines of their own."""
    return "\n\n".join(["Examples:", *commands]).replace("[", r"\[")


def complete_override(incomplete: str) -> list[tuple[str, str]]:
    """Keys of the recipe that begin so, for the shell; behind `=` the names among which a key chooses."""
    from corral.recipe.keys import ANY, all_keys, choices_of, describe, dotted, find_key
    from corral.recipe.parts import KINDS

    written, equals, value = incomplete.partition("=")
    if equals:
        key = find_key(path := tuple(written.split(".")))
        choices = KINDS[path].declared if path in KINDS else [] if key is None else choices_of(key.annotation)
        return [(f"{written}={choice}", "") for choice in choices if choice.startswith(value)]
    keys = (key for key in all_keys().values() if (key.section is None or key.is_part) and ANY not in key.path)
    return [(f"{name}=", describe(key.annotation)) for key in keys if (name := dotted(key.path)).startswith(written)]


class RecipeCommand(TyperCommand):
    """A command with a recipe, whose keys are written without dashes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # of typer's own click, which has no public name
            option = getattr(error, "option_name", None)
            if option is None or len(getattr(error, "possibilities", None) or ()) > 1:
                raise
            from corral.recipe.keys import nearest_key

            key = nearest_key(tuple(option.lstrip("-").replace("-", "_").split(".")))
            if key is None:
                raise
            place = next(number for number, one in enumerate(given) if one.partition("=")[0] == option)
            value = given[place].partition("=")[2] or next(iter(given[place + 1 :]), "")
            raise UserError(f"{option} is no option; keys of the recipe have no dashes: {key}={value}") from None


RecipeFile = Annotated[Path, typer.Argument(help="The recipe, a YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Changes to it: batch.prompts_per_step=16 optimizer.learning_rate=1e-5", autocompletion=complete_override
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")

Debug = Annotated[
    bool, typer.Option("--debug", help="All in this process, on one device: breakpoint() opens a debugger.")
]
PostMortem = Annotated[
    bool, typer.Option("--post-mortem", help="Open a debugger where the run fails, on a cluster in the worker.")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Workers' debuggers, which have no password, listen on the network.")
]

FitDevices = Annotated[
    str | None,
    typer.Option(
        "--devices",
        metavar="8xh100-80",
        help="With --fit: number, kind and GiB of the devices, or 4x8xh100-80 with nodes.",
    ),
]
FitFlag = Annotated[
    bool,
    typer.Option("--fit", help="Find settings with which the recipe fits --devices; if there are none, exit with 2."),
]
Check = Annotated[bool, typer.Option("--check", help="Also read the first rows, and call environment and reward once.")]
ResumeAnyway = Annotated[
    bool, typer.Option("--resume-anyway", help="Go on with a run though its model, data, reward, ... have changed.")
]


def planned(recipe: Path, overrides: Sequence[str] | None) -> "tuple[Recipe, Plan]":
    """Raises everything that is wrong with the recipe, before anything is loaded."""
    return with_plan(load_own_recipe(recipe, overrides or []))


def with_plan(recipe: "Recipe") -> "tuple[Recipe, Plan]":
    from corral.model.families import checked_plan
    from corral.rewards.reward_function import check_name

    for environment in recipe.tagged_environments.values():
        for reward in environment.named_rewards.values():
            if reward.name != "reward_model":  # a role, and no function
                check_name(reward.name)
    return recipe, checked_plan(recipe)


def load_own_recipe(path: Path, overrides: Sequence[str]) -> "Recipe":
    from corral.recipe.load import load_recipe

    if path.suffix in SCRIPTS:
        raise UserError(f"{path} is a script; `corral migrate {path} > recipe.yaml` makes a recipe of it")
    return load_recipe(path, overrides)


def train_recipe(recipe: "Recipe", debugging: "Debugging", resume_anyway: bool = False) -> None:
    from corral.loop.train import train
    from corral.observe.console import Console

    loaded, plan = with_plan(debugging.adapt(recipe))
    console = Console(live=not debugging.here)
    if os.environ.get("RAY_DEBUG_POST_MORTEM") and not debugging.post_mortem:
        console.warn("RAY_DEBUG_POST_MORTEM is not read: `corral train --post-mortem` opens a debugger after a failure")
    for warning in plan.warnings:
        console.warn(warning)
    with debugging.watching(loaded, console):
        train(loaded, plan, console, debugging, resume_anyway=resume_anyway)


def print_plan(recipe: "Recipe", as_json: bool, check: bool = False) -> None:
    """`check`: also looks at trackers, disk and rows, and calls environment and reward once."""
    loaded, plan = with_plan(recipe)
    services = describe_services(loaded)
    text = plan.text() if not services else "\n".join([plan.text(), "services", *(f"  {line}" for line in services)])
    if not as_json:
        print(add_chinese(text, os.environ))
    checked = []
    if check:
        from corral.loop.preflight import check_here

        stream = sys.stderr if as_json else sys.stdout
        checked = check_here(plan, lambda warning: print(f"warning: {warning}", file=stream))
    if as_json:
        print(json.dumps({**plan.as_dict(), "services": services} | ({"checked": checked} if check else {}), indent=2))
    elif check:
        print(add_chinese("\n".join(["checked", *(f"  {line}" for line in checked)]), os.environ))


def rehearse_quickly(recipe: "Recipe", debugging: "Debugging") -> None:
    """Trains one step of the small recipe in this process."""
    from corral.cluster.chaos import free_name
    from corral.cluster.rehearsal_recipe import cut, prepare

    runs = recipe.logging.folder
    folder = runs / free_name(runs, f"{recipe.name}-rehearsal-files")
    rehearsal = cut(recipe, folder)
    prepare(rehearsal)
    for what in rehearsal.replaced:
        print(f"replaced: {what}")
    train_recipe(rehearsal.recipe, debugging)


def rehearse_recipe(path: Path, recipe: "Recipe", on_cluster: bool, as_json: bool) -> None:
    from corral.cluster.rehearsal import rehearse

    _, plan = with_plan(recipe)
    for warning in plan.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    report = rehearse(plan, path, lambda line: print(line, file=sys.stderr, flush=True), on_cluster=on_cluster)
    print(json.dumps(report.as_dict(), indent=2) if as_json else report.text())
    if report.problems:
        raise typer.Exit(1)


def print_fit(path: Path, overrides: Sequence[str], devices: str, as_json: bool) -> None:
    """Prints the settings that fit the devices, and the plan with them."""
    from corral.recipe.fit import Hardware, find_fit
    from corral.recipe.shape import ModelShape

    hardware = Hardware.parse(devices)
    recipe = load_own_recipe(path, overrides)
    fit = find_fit(recipe, hardware, ModelShape.read(recipe.model.path))
    _, plan = planned(path, [*overrides, *fit.overrides])
    if as_json:
        print(json.dumps({**fit.as_dict(), "plan": plan.as_dict()}, indent=2))
        return
    found = "\n".join([*fit.lines(shlex.join([str(path), *overrides]), hardware), ""])
    print(f"{found}\n{add_chinese(plan.text(), os.environ)}")


def describe_services(recipe: "Recipe") -> list[str]:
    """What runs beside the workers of every node; for a retriever, how large its index is, or will be."""
    lines = []
    for name, service in recipe.cluster.services.items():
        what = " ".join(service.command) if service.retriever is None else f"retriever of {service.retriever}"
        own = f" with {service.devices} of its devices" if service.devices else ""
        lines.append(f"{name}: {what}, on every node{own}, at http://127.0.0.1:{service.port}")
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
