"""A foreign configuration turned into a recipe, with what became of each of its keys."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from corral.migrate.outcome import ForeignValue
from corral.migrate.table import ForeignConfig, KeyReport, KeyTable, RecipeValue
from corral.recipe.errors import RecipeError
from corral.recipe.keys import KeyPath, all_keys, dotted, find_key, pattern_of
from corral.recipe.load import problems_of
from corral.recipe.schema import Recipe

MEANINGFUL_NULLS = {("algorithm", "kl", "where")}
"""Keys of ours of which a null says something else than nothing."""


@dataclass(frozen=True)
class Migration:
    table: KeyTable
    recipe: Recipe
    settings: Mapping[KeyPath, RecipeValue]
    """Of ours, those that differ from our defaults, in the order of the schema."""
    entries: tuple[KeyReport, ...]
    """One for each key that was written."""
    pitfalls: tuple[str, ...] = ()
    """What is wrong around the configuration: in the script that it is from."""

    @property
    def unsupported(self) -> list[KeyReport]:
        return [entry for entry in self.entries if entry.outcome.status == "unsupported"]


def migrate(table: KeyTable, given: Mapping[str, ForeignValue], pitfalls: Iterable[str] = ()) -> Migration:
    """Raises a RecipeError with all that is wrong."""
    settings, entries = ForeignConfig(table, given).read()
    chosen = {path: settings[path] for path in in_order(settings) if differs(path, settings[path].value)}
    return Migration(table, validated(chosen), chosen, tuple(entries), tuple(pitfalls))


def differs(path: KeyPath, value: Any) -> bool:
    """From what the key would be if it were left out."""
    key = find_key(path)
    if key is None or key.required or path in MEANINGFUL_NULLS:
        return True
    return bool(key.default != value)


def in_order(paths: Iterable[KeyPath]) -> list[KeyPath]:
    """That of the schema; names of the user's, and what is below them, as they come."""
    order = {path: number for number, path in enumerate(all_keys())}
    first: dict[KeyPath, int] = {}
    for path in (paths := list(paths)):
        for end in range(1, len(path) + 1):
            first.setdefault(path[:end], len(first))
    place = {known: (order.get(pattern_of(known), 0), number) for known, number in first.items()}
    return sorted(paths, key=lambda path: [place[path[:end]] for end in range(1, len(path) + 1)])


def validated(settings: Mapping[KeyPath, RecipeValue]) -> Recipe:
    """Problems are told at the foreign key that a value is from."""
    nested = nest({path: setting.value for path, setting in settings.items()})
    try:
        return Recipe.model_validate(nested)
    except ValidationError as error:
        lines = []
        for path, message in problems_of(error, nested):
            source = next((settings[path[:end]] for end in range(len(path), 0, -1) if path[:end] in settings), None)
            origin = f"{source.given.where or 'default'}: `{source.given}`: " if source else ""
            missing = "" if source else "; nothing in the configuration says so"
            lines.append(f"{origin}{message}{missing}")
        raise RecipeError(lines) from None


def nest(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in values.items():
        section = nested
        for end, name in enumerate(path[:-1], start=1):
            section = section.setdefault(name, {})
            assert isinstance(section, dict), dotted(path[:end])
        section[path[-1]] = value
    return nested
