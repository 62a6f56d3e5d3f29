"""`corral migrate`, and `--dialect` of `corral train` and `plan`: recipes of verl, Search-R1, ROLL and RLinf."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from corral.recipe.errors import UserError

if TYPE_CHECKING:
    from corral.migrate.migration import Migration
    from corral.recipe.schema import Recipe


LONGEST_PATH = 250
SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch")


class Dialect(StrEnum):
    VERL = "verl"
    SEARCH_R1 = "search_r1"
    ROLL = "roll"
    RLINF = "rlinf"


RecipeOrWord = Annotated[
    str | None, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.", show_default=False)
]
DialectName = Annotated[
    Dialect | None,
    typer.Option(
        "--dialect",
        help="The words behind `--`, or the configuration that is named, are another system's.",
        show_default=False,
    ),
]
ConfigPath = Annotated[
    str | None,
    typer.Option(
        "--config_path", "--config-path", help="With --dialect: the folder of --config_name.", show_default=False
    ),
]
ConfigName = Annotated[
    str | None,
    typer.Option("--config_name", "--config-name", help="With --dialect: a YAML file's name.", show_default=False),
]
AllowUnsupported = Annotated[
    bool, typer.Option("--allow-unsupported", help="With --dialect: go on without the keys that Corral lacks.")
]
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


def register(app: typer.Typer) -> None:
    app.command()(migrate)


def migrate(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE | -- COMMAND...", help="A script, a YAML file, or a whole command.", show_default=False
        ),
    ],
    dialect: DialectName = None,
    define: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE of a variable that the script does not set.", show_default=False),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if any key is unsupported.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Print the recipe that a command or configuration of verl, Search-R1, ROLL or RLinf amounts to.

    The recipe goes to standard output, what became of each key to standard error. Nothing of a script is run.
    """
    from corral.migrate.sources import is_own
    from corral.migrate.written import as_dict, recipe_text, report_text
    from corral.recipe.load import load_recipe
    from corral.recipe.plan import make_plan

    path = Path(source[0])
    if len(source) == 1 and is_path(source[0]) and path.is_file() and is_own(path):
        make_plan(load_recipe(path))
        text = path.read_text()
        print(json.dumps({"dialect": "Corral", "recipe": text}, indent=2) if as_json else text, end="")
        print(f"{path} is a recipe of Corral's already", file=sys.stderr)
        return
    made = read(source, dialect, define or [])
    print(json.dumps(as_dict(made), indent=2) if as_json else recipe_text(made), end="\n" if as_json else "")
    if not as_json:
        print(report_text(made), file=sys.stderr)
    make_plan(made.recipe)
    if strict and made.unsupported:
        raise UserError(unsupported_in_words(made))


def read(source: Sequence[str], dialect: Dialect | None, define: Sequence[str]) -> "Migration":
    from corral.migrate.sources import migrate_file, migrate_words

    defined = dict(name_and_value(one) for one in define)
    if len(source) == 1 and is_path(source[0]):
        return migrate_file(Path(source[0]), dialect, defined)
    return migrate_words(source, dialect, defined)


def is_path(word: str) -> bool:
    """Of a script or a YAML file, be it there or not."""
    return "=" not in word and len(word) < LONGEST_PATH


def name_and_value(written: str) -> tuple[str, str]:
    name, equals, value = written.partition("=")
    if not equals or not (name.isidentifier() or name.isdecimal()):
        raise UserError(f"--define {written}: write NAME=VALUE")
    return name, value


@dataclass(frozen=True)
class Asked:
    """A recipe of ours, or with a dialect one of another system's."""

    recipe: str | None
    overrides: Sequence[str]
    dialect: Dialect | None = None
    config_path: str | None = None
    config_name: str | None = None
    allow_unsupported: bool = False
    nodes: int | None = None
    """To shrink it to."""

    def load(self) -> "Recipe":
        recipe = self._own() if self.dialect is None else self._foreign()
        if self.nodes is None:
            return recipe
        from corral.loop.shrink import shrink

        return shrink(recipe, self.nodes)

    def prepare(self, recipe: "Recipe") -> None:
        """Before it is run."""
        if self.nodes is not None:
            from corral.loop.shrink import prepare_index

            prepare_index(recipe)

    def _own(self) -> "Recipe":
        from corral.recipe.load import load_recipe

        given = {"--config_path": self.config_path, "--config_name": self.config_name}
        for option, value in {**given, "--allow-unsupported": self.allow_unsupported}.items():
            if value:
                raise UserError(f"{option} belongs to --dialect")
        if self.recipe is None:
            raise UserError("name a recipe, a YAML file; or --dialect and a command of another system behind `--`")
        if Path(self.recipe).suffix in SCRIPTS:
            raise UserError(
                f"{self.recipe} is a script; `corral migrate {self.recipe} > recipe.yaml` makes a recipe of it"
            )
        return load_recipe(self.recipe, self.overrides)

    def _foreign(self) -> "Recipe":
        words = [word for word in (self.recipe, *self.overrides) if word is not None]
        for option, value in (("--config_path", self.config_path), ("--config_name", self.config_name)):
            words += [option, value] if value is not None else []
        if not words:
            raise UserError(f"--dialect {self.dialect}: write the command behind `--`, or name a --config_name")
        made = read(words, self.dialect, [])
        if made.unsupported and not self.allow_unsupported:
            raise UserError(f"{unsupported_in_words(made)}\n--allow-unsupported goes on without")
        for pitfall in made.pitfalls:
            print(f"warning: {pitfall}", file=sys.stderr)
        return made.recipe


def unsupported_in_words(made: "Migration") -> str:
    return "\n".join(f"{one.given.where}: `{one.given}` is unsupported: {one.outcome.note}" for one in made.unsupported)
