"""A migration to look at: the recipe with a comment for every line, and the report."""

import json
import re
from collections.abc import Iterator
from typing import Any, get_args

import yaml

from corral.migrate.migration import Migration
from corral.migrate.outcome import Status, format_value, is_secret, one_line
from corral.migrate.table import KeyReport, RecipeValue
from corral.recipe.keys import KeyPath
from corral.recipe.load import RecipeDumper
from corral.recipe.references import escape_references

TITLES: dict[Status, str] = {
    "mapped": "mapped",
    "converted": "converted",
    "built in": "built in: Corral does so anyway, or decides it by itself",
    "no effect": "without effect there, and so here",
    "unsupported": "unsupported",
}
assert tuple(TITLES) == get_args(Status)


def recipe_text(migration: Migration) -> str:
    """YAML that reads back as the migration's recipe."""
    title = migration.table.title
    lines = [f"# Written by `corral migrate` from a configuration of {title}. Behind each line: where it is from."]
    above: KeyPath = ()
    for path, setting in migration.settings.items():
        common = next(end for end in range(len(path)) if path[: end + 1] != above[: end + 1])
        for depth in range(common, len(path) - 1):
            lines += ["", f"{path[0]}:"] if depth == 0 else [f"{'  ' * depth}{key_text(path[depth])}:"]
        indent = "  " * (len(path) - 1)
        lines.append(f"{indent}{key_text(path[-1])}: {value_text(setting.value)}  # {comment(setting, title)}")
        above = path[:-1]
    return "\n".join(lines) + "\n"


def key_text(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z_][\w,.-]*", key) else json.dumps(key)


def value_text(value: Any) -> str:
    """On one line."""
    options: dict[str, Any] = {"default_flow_style": True, "allow_unicode": True, "width": 10**9, "sort_keys": False}
    written: str = yaml.dump([escape_references(value)], Dumper=RecipeDumper, **options)
    return written.strip()[1:-1]


def comment(setting: RecipeValue, title: str) -> str:
    given, outcome = setting.given, setting.outcome
    if not given.where:
        words = outcome.note or given.key
        return one_line(f"{title}'s default: {words}")
    return one_line(f"{given.key}: {outcome.note}" if outcome.note else given.key)


def report_text(migration: Migration) -> str:
    """Every key that was written, by what became of it; and what looks wrong."""
    title, entries = migration.table.title, migration.entries
    by_status = {status: [entry for entry in entries if entry.outcome.status == status] for status in TITLES}
    counts = ", ".join(f"{len(found)} {status}" for status, found in by_status.items() if found)
    lines = [f"{title}: {len(entries)} keys: {counts}" if entries else f"{title}: no keys"]
    for status, found in by_status.items():
        if found:
            lines += ["", TITLES[status], *(f"  {entry_text(entry)}" for entry in found)]
    if num_defaults := len(list(defaults_of(migration))):
        lines += ["", f"besides, {title}'s defaults where Corral's are others: {num_defaults} lines of the recipe"]
    if migration.pitfalls:
        lines += ["", "look at these", *(f"  {pitfall}" for pitfall in migration.pitfalls)]
    return "\n".join(lines)


def defaults_of(migration: Migration) -> Iterator[tuple[KeyPath, RecipeValue]]:
    yield from ((path, one) for path, one in migration.settings.items() if not one.given.where)


def entry_text(entry: KeyReport) -> str:
    outcome = entry.outcome
    ours = ", ".join(f"{'.'.join(path)}: {format_value(value)}" for path, value in outcome.ours.items())
    return one_line(
        " ".join([str(entry.given), *([f"-> {ours}"] if ours else []), *([f"({outcome.note})"] * bool(outcome.note))])
    )


def as_dict(migration: Migration) -> dict[str, Any]:
    """For programs."""
    return {
        "dialect": migration.table.title,
        "recipe": recipe_text(migration),
        "keys": [
            {
                "key": entry.given.key,
                "value": "***" if is_secret(entry.given.key) and entry.given.value else entry.given.value,
                "where": entry.given.where,
                "status": entry.outcome.status,
                "ours": {".".join(path): value for path, value in entry.outcome.ours.items()},
                "note": entry.outcome.note,
            }
            for entry in migration.entries
        ],
        "defaults": {".".join(path): setting.value for path, setting in defaults_of(migration)},
        "pitfalls": list(migration.pitfalls),
    }
