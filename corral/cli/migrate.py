"""`corral migrate`: recipes of verl, Search-R1, ROLL and RLinf as recipes of Corral, printed, planned or trained."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corral.cli.chinese import add_chinese
from corral.cli.planning import Debug, Insecure, PostMortem, ResumeAnyway, print_plan, train_recipe
from corral.recipe.errors import RecipeError, UserError

if TYPE_CHECKING:
    from corral.migrate.guide import Guide
    from corral.migrate.migration import Migration
    from corral.recipe.schema import Recipe

MAX_PATH_LENGTH = 250


class System(StrEnum):
    VERL = "verl"
    VERL_SFT = "verl_sft"
    SEARCH_R1 = "search_r1"
    ROLL = "roll"
    ROLL_SFT = "roll_sft"
    ROLL_DPO = "roll_dpo"
    RLINF = "rlinf"


def migrate(
    source: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE [KEY=VALUE...] | -- COMMAND...",
            help="A script, a YAML file or a guide (.md, .rst, .txt), with changes to its keys or the recipe's; or a "
            "whole command.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[
        System | None,
        typer.Option(help="The system that file or command are of; else found out by it.", show_default=False),
    ] = None,
    config_path: Annotated[
        str | None,
        typer.Option("--config_path", "--config-path", help="The folder of --config_name.", show_default=False),
    ] = None,
    config_name: Annotated[
        str | None,
        typer.Option("--config_name", "--config-name", help="With --system: a YAML file's name.", show_default=False),
    ] = None,
    define: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE of a variable that the script does not set.", show_default=False),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if any key is unsupported.")] = False,
    every_key: Annotated[bool, typer.Option("--all", help="Report every key with its value.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Print the plan of the recipe instead.")] = False,
    train: Annotated[bool, typer.Option("--train", help="Train the recipe instead of printing it.")] = False,
    allow_unsupported: Annotated[
        bool, typer.Option("--allow-unsupported", help="Plan or train without the keys that Corral lacks.")
    ] = False,
    debug: Debug = False,
    post_mortem: PostMortem = False,
    insecure: Insecure = False,
    resume_anyway: ResumeAnyway = False,
) -> None:
    """Print the recipe that a command or configuration of verl, Search-R1, ROLL or RLinf amounts to, or run it.

    The recipe goes to standard output, what became of its keys to standard error. Nothing of a script is run.
    """
    if plan and train:
        raise UserError("--plan prints the plan and --train trains: give one of them")
    if (every_key or strict) and (plan or train):
        raise UserError("--all and --strict belong to the report, which --plan and --train do not print")
    if as_json and train:
        raise UserError("--json belongs to the report and to --plan: --train has no output for programs")
    if allow_unsupported and not (plan or train):
        raise UserError("--allow-unsupported belongs to --plan and --train")
    if (debug or post_mortem or insecure or resume_anyway) and not train:
        raise UserError("--debug, --post-mortem, --insecure and --resume-anyway belong to --train")
    words = list(source or [])
    for option, value in (("--config_path", config_path), ("--config_name", config_name)):
        words += [option, value] if value is not None else []
    if not words:
        raise UserError("name a script or a YAML file of another system, or write its command behind `--`")
    recipe = own_recipe(words)
    if recipe is None:
        defined = dict(name_and_value(one) for one in define or [])
        guide = guide_of(words, system, defined)
        if guide is not None and not (plan or train) and guide.line is None and len(guide.trainings) != 1:
            print_guide(guide, as_json)
            return
        migration = read(words, system, defined, every_key, as_json, guide)
        if not (plan or train):
            print_migration(migration, strict, every_key, as_json, guide)
            return
        recipe = accepted(migration, allow_unsupported)
    elif system is not None or define or strict or every_key:
        raise UserError(
            f"{words[0]} is a recipe of Corral's already: --system, --define, --strict and --all are for other systems"
        )
    elif not (plan or train):
        print_own(recipe, words, as_json)
        return
    if plan:
        print_plan(recipe, as_json)
        return
    from corral.runtime.local_debugger import Debugging

    train_recipe(recipe, Debugging(debug, post_mortem, insecure), resume_anyway)


def guide_of(words: Sequence[str], system: str | None, defined: Mapping[str, str]) -> "Guide | None":
    """The page that is named, with what becomes of its commands. None: something else is named."""
    from corral.migrate.guide import Guide, guide_named, read_guide

    named = guide_named(words[0])
    return named and Guide(named[0], read_guide(named[0], system, defined, words[1:]), named[1])


def print_guide(guide: "Guide", as_json: bool) -> None:
    from corral.migrate.guide import as_list, guide_text

    if as_json:
        print(json.dumps({"guide": as_list(guide.answers)}, indent=2))
        return
    print(guide_text(guide), file=sys.stderr)


def read(
    words: Sequence[str],
    system: str | None,
    defined: Mapping[str, str],
    every_key: bool,
    as_json: bool,
    guide: "Guide | None",
) -> "Migration":
    """The migration. What is refused has its report, too, before the error."""
    from corral.migrate.config_sources import migrate_file, migrate_words
    from corral.migrate.migration import RefusedConfig, as_dict, report_text

    try:
        if guide is not None:
            return guide.training()
        if is_file_with_overrides(words):
            return migrate_file(Path(words[0]), system, defined, words[1:])
        return migrate_words(words, system, defined)
    except RecipeError as error:
        refused = error if isinstance(error, RefusedConfig) else RefusedConfig(error.problems)
        if as_json:
            print(json.dumps(as_dict(refused, error.problems), indent=2))
        elif refused.entries or refused.pitfalls:
            report = f"{report_text(refused, every_key)}\n\nthere is no recipe:"
            print(add_chinese(report, os.environ), file=sys.stderr)
        raise


def is_file_with_overrides(words: Sequence[str]) -> bool:
    """A script or a YAML file, be it there or not, and changes to keys of the recipe behind it."""
    file, *overrides = words
    is_path = "=" not in file and len(file) < MAX_PATH_LENGTH
    are_overrides = all("=" in word or word.startswith("~") for word in overrides)
    return is_path and are_overrides and (not overrides or Path(file).is_file())


def own_recipe(words: Sequence[str]) -> "Recipe | None":
    """The recipe, where the file is one of Corral already."""
    from corral.migrate.config_sources import is_own
    from corral.recipe.load import load_recipe

    path = Path(words[0])
    if is_file_with_overrides(words) and path.is_file() and is_own(path):
        return load_recipe(path, words[1:])
    return None


def name_and_value(written: str) -> tuple[str, str]:
    name, equals, value = written.partition("=")
    if not equals or not (name.isidentifier() or name.isdecimal()):
        raise UserError(f"--define {written}: write NAME=VALUE")
    return name, value


def print_migration(
    migration: "Migration", strict: bool, every_key: bool, as_json: bool, guide: "Guide | None" = None
) -> None:
    from corral.migrate.guide import as_list, guide_text
    from corral.migrate.migration import as_dict, recipe_text, report_text
    from corral.model.families import checked_plan

    problem = None
    try:
        checked_plan(migration.recipe)
    except UserError as error:
        problem = error
    if as_json:
        page = {"guide": as_list(guide.answers)} if guide else {}
        print(json.dumps(page | as_dict(migration, str(problem).splitlines() if problem else ()), indent=2))
    else:
        print(recipe_text(migration), end="")
        if guide is not None and guide.line is None:
            print(f"{guide_text(guide)}\n", file=sys.stderr)
        print(add_chinese(report_text(migration, every_key), os.environ), file=sys.stderr)
    if problem is not None:
        raise problem
    if strict and migration.unsupported:
        raise UserError(describe_unsupported(migration))


def print_own(recipe: "Recipe", words: Sequence[str], as_json: bool) -> None:
    from corral.model.families import checked_plan
    from corral.recipe.load import dump_recipe

    checked_plan(recipe)
    text = dump_recipe(recipe) if words[1:] else Path(words[0]).read_text()
    print(json.dumps({"system": "Corral", "recipe": text}, indent=2) if as_json else text, end="")
    print(f"{words[0]} is a recipe of Corral's already", file=sys.stderr)


def accepted(migration: "Migration", allow_unsupported: bool) -> "Recipe":
    """The recipe to plan or train, where all of it is supported or the user goes on without."""
    if migration.unsupported and not allow_unsupported:
        raise UserError(f"{describe_unsupported(migration)}\n--allow-unsupported goes on without")
    for pitfall in migration.pitfalls:
        print(f"warning: {pitfall}", file=sys.stderr)
    return migration.recipe


def describe_unsupported(migration: "Migration") -> str:
    return "\n".join(
        f"{one.given.where}: `{one.given}` is unsupported: {one.outcome.note}" for one in migration.unsupported
    )
