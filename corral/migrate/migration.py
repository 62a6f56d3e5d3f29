"""A configuration of another system as a recipe, with what became of each of its keys; both as text."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from corral.migrate.outcome import ABSENT, ForeignValue, Outcome, Status, as_path, mapped
from corral.migrate.table import ForeignConfig, KeyReport, KeyTable, RecipeValue
from corral.migrate.value_kinds import format_value, is_secret, one_line
from corral.recipe.document import OVERRIDE, Document, apply_override, compose, is_part
from corral.recipe.errors import RecipeError
from corral.recipe.keys import KeyPath, all_keys, dotted, find_key, pattern_of
from corral.recipe.load import RecipeDumper, problems_of, problems_of_parts, recipe_from
from corral.recipe.references import escape_references
from corral.recipe.schema import Recipe

ALWAYS_WRITTEN = {
    as_path(key)
    for key in (
        *("algorithm.name", "optimizer.learning_rate", "critic.optimizer.learning_rate"),
        *("algorithm.kl.where", "rollout.engine.name", "model.lora.rank"),
    )
}
"""Keys that are written with their defaults, too. The first are what a reader compares, and stay as they were if
Corral's defaults change; a null of KL says something else than nothing, the engine's line says why it is this one, and
without a rank there would be no adapters."""
TITLES: dict[Status, str] = {
    "mapped": "mapped",
    "converted": "converted",
    "built in": "built in: Corral does so anyway, or decides it by itself",
    "no effect": "without effect there, and so here",
    "unsupported": "unsupported",
}
assert tuple(TITLES) == get_args(Status)
COUNTING = ("algorithm", "batch", "optimizer")
"""Sections of a recipe whose values the report names, also where they are the other system's defaults."""
NUM_SHOWN = 5
"""Number of keys that a line of the report names, where all of them have the same note."""


@dataclass(frozen=True)
class Migration:
    table: KeyTable
    recipe: Recipe
    settings: Mapping[KeyPath, RecipeValue]
    """Values of the recipe that differ from Corral's defaults or are ALWAYS_WRITTEN, in the order of the schema."""
    entries: tuple[KeyReport, ...]
    """What became of each key that was written."""
    pitfalls: tuple[str, ...] = ()
    """Warnings about what is around the configuration, as in the script that it is from."""

    @property
    def unsupported(self) -> list[KeyReport]:
        return [entry for entry in self.entries if entry.outcome.status == "unsupported"]

    @property
    def title(self) -> str:
        return self.table.title


class RefusedConfig(RecipeError):
    """All that is wrong with a configuration, and what became of those of its keys that could be read."""

    def __init__(
        self, problems: Iterable[str], title: str = "", entries: Iterable[KeyReport] = (), pitfalls: Iterable[str] = ()
    ) -> None:
        super().__init__(dict.fromkeys(problems))
        self.title, self.entries, self.pitfalls = title, tuple(entries), tuple(dict.fromkeys(pitfalls))


def migrate(
    table: KeyTable, given: Mapping[str, ForeignValue], pitfalls: Iterable[str] = (), problems: Iterable[str] = ()
) -> Migration:
    """Raises a RefusedConfig with all that is wrong; `problems` are what was wrong before."""
    config = ForeignConfig(table, given)
    config.problems[:0] = problems
    settings, entries = config.read()
    chosen = {path: settings[path] for path in in_order(settings) if differs(path, settings[path].value)}
    try:
        if config.problems:
            raise RecipeError(config.problems)
        return Migration(table, validated(chosen), chosen, tuple(entries), tuple(pitfalls))
    except RecipeError as error:
        raise RefusedConfig(error.problems, table.title, entries, pitfalls) from None


def with_overrides(migration: Migration, overrides: Sequence[str]) -> Migration:
    """The migration with changes to keys of the recipe, `key=value` as `corral train` takes them."""
    if not overrides:
        return migration
    document = Document("the recipe")
    node = compose(recipe_text(migration), document.file)
    assert isinstance(node, yaml.MappingNode)
    document.add_keys((), node)
    for override in overrides:
        apply_override(document, override)
    recipe = recipe_from(document)
    settings = {path: one for path, one in migration.settings.items() if value_at(document.values, path) == one.value}
    for path, where in document.origins.items():
        value = value_at(document.values, path)
        if where.line == OVERRIDE and not isinstance(value, dict):
            given = ForeignValue("changed on the command line", value, where.text)
            settings[path] = RecipeValue(value, given, mapped(path, value))
    return replace(migration, recipe=recipe, settings={path: settings[path] for path in in_order(settings)})


def with_setting(migration: Migration, path: KeyPath, setting: RecipeValue) -> Migration:
    """The migration with one more setting, which is not from the training's own keys."""
    settings = {**migration.settings, path: setting}
    entries = (*migration.entries, KeyReport(setting.given, setting.outcome))
    ordered = {path: settings[path] for path in in_order(settings)}
    return replace(migration, recipe=validated(ordered), settings=ordered, entries=entries)


def value_at(values: Any, path: KeyPath) -> Any:
    for name in path:
        values = values.get(name, ABSENT) if isinstance(values, dict) else ABSENT
    return values


def differs(path: KeyPath, value: Any) -> bool:
    """Whether a value is other than what the key would be if it were left out."""
    key = find_key(path)
    if key is None or key.required or path in ALWAYS_WRITTEN:
        return True
    return bool(key.default != value)


def in_order(paths: Iterable[KeyPath]) -> list[KeyPath]:
    """Paths in the order of the schema; names that the user chose, and what is below them, as they come."""
    order = {path: number for number, path in enumerate(all_keys())}
    first: dict[KeyPath, int] = {}
    for path in (paths := list(paths)):
        for end in range(1, len(path) + 1):
            first.setdefault(path[:end], len(first))
    place = {known: (order.get(pattern_of(known), 0), number) for known, number in first.items()}
    return sorted(paths, key=lambda path: [place[path[:end]] for end in range(1, len(path) + 1)])


def validated(settings: Mapping[KeyPath, RecipeValue]) -> Recipe:
    """The recipe; problems are reported at the foreign key that a value is from."""
    nested = nest({path: setting.value for path, setting in settings.items()})
    problems = problems_of_parts(nested)
    try:
        recipe = Recipe.model_validate(nested)
    except ValidationError as error:
        problems = [*problems_of(error, nested), *problems]
    if not problems:
        return recipe
    lines = []
    for path, message in problems:
        source = next((settings[path[:end]] for end in range(len(path), 0, -1) if path[:end] in settings), None)
        origin = f"{source.given.where or 'default'}: `{source.given}`: " if source else ""
        missing = "" if source else "; nothing in the configuration says so"
        lines.append(f"{origin}{message}{missing}")
    raise RecipeError(lines)


def nest(values: Mapping[KeyPath, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, value in values.items():
        section = nested
        for end, name in enumerate(path[:-1], start=1):
            section = section.setdefault(name, {})
            assert isinstance(section, dict), dotted(path[:end])
        section[path[-1]] = value
    return nested


# --- as text


def recipe_text(migration: Migration) -> str:
    """YAML that reads back as the migration's recipe, with a comment behind every line."""
    title = migration.table.title
    lines = [f"# Written by `corral migrate` from a configuration of {title}. Behind each line: where it is from."]
    above: KeyPath = ()
    for path, setting in shortened(migration.settings).items():
        common = next(end for end in range(len(path)) if path[: end + 1] != above[: end + 1])
        for depth in range(common, len(path) - 1):
            lines += ["", f"{path[0]}:"] if depth == 0 else [f"{'  ' * depth}{key_text(path[depth])}:"]
        indent = "  " * (len(path) - 1)
        lines.append(f"{indent}{key_text(path[-1])}: {value_text(setting.value)}  # {comment(setting, title)}")
        above = path[:-1]
    return "\n".join(lines) + "\n"


def shortened(settings: Mapping[KeyPath, RecipeValue]) -> dict[KeyPath, RecipeValue]:
    """The settings with `loss: gspo` for `loss: {name: gspo}`, where the recipe has no options of that part."""
    counts = Counter(path[:-1] for path in settings)
    return {
        path[:-1] if is_part(path[:-1]) and path[-1] == "name" and counts[path[:-1]] == 1 else path: setting
        for path, setting in settings.items()
    }


def key_text(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z_][\w,.-]*", key) else json.dumps(key)


def value_text(value: Any) -> str:
    """A value as YAML on one line."""
    options: dict[str, Any] = {"default_flow_style": True, "allow_unicode": True, "width": 10**9, "sort_keys": False}
    written: str = yaml.dump([escape_references(value)], Dumper=RecipeDumper, **options)
    return written.strip()[1:-1]


def comment(setting: RecipeValue, title: str) -> str:
    given, outcome = setting.given, setting.outcome
    if not given.where:
        return one_line(f"{title}'s default: {outcome.note or given.key}")
    return one_line(f"{given.key}: {outcome.note}" if outcome.note else given.key)


def report_text(found: Migration | RefusedConfig, every_key: bool = False) -> str:
    """What changes the training or needs a decision, each with both values; then the rest, by note."""
    title, entries = found.title, found.entries
    by_status = {status: [entry for entry in entries if entry.outcome.status == status] for status in TITLES}
    counts = ", ".join(f"{len(some)} {status}" for status, some in by_status.items() if some)
    lines = [f"{title}: {len(entries)} keys: {counts}" if entries else f"{title}: no keys"]
    first = by_status["unsupported"] + [entry for entry in entries if entry.outcome.differs]
    if first:
        lines += ["", "changes the training, or needs a decision", *map(decision_text, first)]
    if found.pitfalls:
        lines += ["", "look at these", *(f"  {pitfall}" for pitfall in found.pitfalls)]
    for status, some in by_status.items():
        if rest := [entry for entry in some if entry not in first]:
            each = every_key or status == "converted"
            lines += ["", TITLES[status], *((f"  {entry_text(one)}" for one in rest) if each else grouped(rest))]
    if isinstance(found, Migration) and (defaults := dict(defaults_of(found))):
        algorithm = [
            f"{dotted(path)}: {format_value(one.value)}" for path, one in defaults.items() if path[0] in COUNTING
        ]
        lines += ["", f"besides, {title}'s defaults: {len(defaults)} lines of the recipe"]
        lines += [f"  {one_line(', '.join(algorithm))}"] * bool(algorithm)
    if not every_key and len(entries) > len(first) + len(by_status["converted"]):
        lines += ["", "`--all` lists every key"]
    return "\n".join(lines)


def decision_text(entry: KeyReport) -> str:
    """Where it is written, its value there, and what the recipe has for it."""
    outcome = entry.outcome
    here = ours_text(outcome) or "nothing"
    return "  " + one_line(f"{entry.given.where}: {entry.given}; here {here} ({outcome.note})")


def grouped(entries: Iterable[KeyReport]) -> Iterator[str]:
    """Keys with the same note, on one line."""

    def note(entry: KeyReport) -> str:
        return entry.outcome.note

    for reason, some in groupby(sorted(entries, key=note), key=note):
        keys = [one.given.key for one in some]
        more = f" and {len(keys) - NUM_SHOWN} more" if len(keys) > NUM_SHOWN else ""
        yield "  " + one_line(f"{reason or 'under another name'}: {', '.join(keys[:NUM_SHOWN])}{more}")


def defaults_of(migration: Migration) -> Iterator[tuple[KeyPath, RecipeValue]]:
    yield from ((path, one) for path, one in migration.settings.items() if not one.given.where)


def ours_text(outcome: Outcome) -> str:
    return ", ".join(f"{'.'.join(path)}: {format_value(value)}" for path, value in outcome.ours.items())


def entry_text(entry: KeyReport) -> str:
    outcome, ours = entry.outcome, ours_text(entry.outcome)
    return one_line(
        " ".join([str(entry.given), *([f"-> {ours}"] if ours else []), *([f"({outcome.note})"] * bool(outcome.note))])
    )


def as_dict(migration: Migration | RefusedConfig, problems: Sequence[str] = ()) -> dict[str, Any]:
    """The migration for programs, or why there is none."""
    made = migration if isinstance(migration, Migration) else None
    return {
        "system": migration.title or None,
        "recipe": recipe_text(made) if made else None,
        "problems": list(problems),
        "keys": [
            {
                "key": entry.given.key,
                "value": "***" if is_secret(entry.given.key) and entry.given.value else entry.given.value,
                "where": entry.given.where,
                "status": entry.outcome.status,
                "ours": {".".join(path): value for path, value in entry.outcome.ours.items()},
                "note": entry.outcome.note,
                "differs": entry.outcome.differs or entry.outcome.status == "unsupported",
            }
            for entry in migration.entries
        ],
        "defaults": {".".join(path): setting.value for path, setting in (defaults_of(made) if made else ())},
        "pitfalls": list(migration.pitfalls),
    }
