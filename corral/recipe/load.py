"""From a YAML file and overrides to a `Recipe`, and back. All problems are reported, each with its place."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from corral.recipe.document import Document, apply_override, plain_scalar, read_document, show
from corral.recipe.keys import (
    ANY,
    Key,
    KeyPath,
    choices_of,
    describe,
    did_you_mean,
    dotted,
    find_key,
    nearest,
    nearest_key,
    required_below,
)
from corral.recipe.presets import Problem, choose_parts, engine_difference
from corral.recipe.references import escape_references, resolve_references
from corral.recipe.renamed_keys import renamed_key
from corral.recipe.schema import Recipe

MOST_HINTS = 20
"""Unknown keys for which a similar one is looked for, which takes some milliseconds. A file with more is no recipe."""
UNUSUAL_LINE_BREAKS = set("\r\x85\u2028\u2029")


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """Raises a RecipeError with one line per problem. Rules across keys are checked by `rules.check`."""
    document = read_document(Path(path))
    for override in overrides:
        apply_override(document, override)
    return recipe_from(document)


def recipe_from(document: Document) -> Recipe:
    """The recipe that a document with all its overrides is. Raises as `load_recipe` does."""
    resolve_references(document)
    return validate(document)


def dump_recipe(recipe: Recipe) -> str:
    """YAML that `load_recipe` reads back: the keys that were set."""
    values = recipe.model_dump(mode="json", exclude_unset=True)
    ordered = {"name": recipe.name} | values
    return yaml.dump(
        escape_references(ordered), Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=10**6, indent=2
    )


class RecipeDumper(yaml.SafeDumper):
    """Quotes the text that would not be read back as text, and writes several lines as several lines."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = None
    if "\n" in text.strip() and not set(text) & UNUSUAL_LINE_BREAKS:
        style = "|"
    elif set(text) & {"\n", *UNUSUAL_LINE_BREAKS}:
        style = '"'
    elif not isinstance(plain_scalar(text), str):
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


RecipeDumper.add_representer(str, _represent_text)


def validate(document: Document) -> Recipe:
    drop_empty_sections(document.values, ())
    recipe = None
    try:
        # Through JSON, because there pydantic can be strict about types and still take a list for a tuple.
        recipe = Recipe.model_validate_json(json.dumps(document.values), strict=True)
    except ValidationError as error:
        for path, message in problems_of(error, document.values):
            if not any(path[:end] in document.broken for end in range(len(path) + 1)):
                document.report(document.where(path), message)
    for path, message in problems_of_parts(document.values):
        document.report(document.where(path), message)
    document.raise_problems()
    assert recipe is not None
    return recipe


def drop_empty_sections(values: dict[str, Any], path: KeyPath) -> None:
    """`batch:` with all its keys commented out is not a mistake."""
    for name in list(values):
        key = find_key((*path, name))
        if key is None or not (key.section is not None or key.named_sections):
            continue
        if values[name] is None and key.path[-1] == ANY:
            values[name] = {}  # a name is not nothing
        elif (values[name] is None and not key.optional) or (key.is_part and values[name] == {"name": None}):
            del values[name]
        elif isinstance(values[name], dict):
            drop_empty_sections(values[name], (*path, name))


def problems_of_parts(values: dict[str, Any]) -> list[Problem]:
    algorithm, schedule, train, rollout = (
        values.get(name, {}) for name in ("algorithm", "schedule", "train", "rollout")
    )
    parallel = train.get("parallel", {}) if isinstance(train, dict) else {}
    engine = rollout.get("engine", {}) if isinstance(rollout, dict) else {}
    if not all(isinstance(section, dict) for section in (algorithm, schedule, parallel, engine)):
        return []  # which is reported
    parallel = {} if algorithm.get("old_logprobs") else parallel
    difference = engine_difference(schedule.get("max_staleness"), parallel, engine.get("name"))
    return choose_parts(algorithm, difference is not None)[1]


def problems_of(error: ValidationError, values: dict[str, Any]) -> Iterator[Problem]:
    """pydantic's errors, as problems with keys. A key with alternatives gives one for each: the first is reported."""
    reported: set[KeyPath] = set()
    for detail in error.errors(include_url=False):
        location = tuple(map(str, detail["loc"]))
        problems: list[Problem]
        if not location:
            problems = [((), "holds text that is not valid Unicode")]
        elif detail["type"] == "extra_forbidden":
            found = leaves(location, detail["input"])
            problems = [unknown_key(path, len(reported) + number < MOST_HINTS) for number, path in enumerate(found)]
        elif detail["type"] == "missing" and find_key(location) is not None:
            problems = [(path, f"`{dotted(path)}` is missing") for path in required_below(location)]
        else:
            problems = [wrong_value(location, detail["input"], values)]
        for path, message in problems:
            if path not in reported:
                reported.add(path)
                yield path, message


def unknown_key(path: KeyPath, with_hint: bool) -> Problem:
    if renamed := renamed_key(path):
        return path, f"`{dotted(path)}` is now {renamed}"
    return path, f"`{dotted(path)}` is not a key{did_you_mean(nearest_key(path) if with_hint else None)}"


def leaves(path: KeyPath, value: Any) -> list[KeyPath]:
    """The keys that were written below an unknown one."""
    if not isinstance(value, dict) or not value:
        return [path]
    return [leaf for name, item in value.items() for leaf in leaves((*path, name), item)]


def wrong_value(location: KeyPath, given: Any, values: dict[str, Any]) -> Problem:
    key, path = key_at(location)
    choices = choices_of(key.annotation)
    if choices and isinstance(given, str):
        near = did_you_mean(nearest(given, choices))
        known = ["true", "false", *choices] if bool in get_args(key.annotation) else choices
        return path, f"`{dotted(path)}: {show(given)}` is not one of {', '.join(known)}{near}"
    value: Any = values
    for name in path:
        value = value[name]
    expected = describe(key.annotation if len(path) == len(key.path) else key.value_annotation)
    hint = "" if isinstance(value, str) or expected != "text" else "; put it in quotes"
    return path, f"`{dotted(path)}: {show(value)}` should be {expected}{hint}"


def key_at(location: KeyPath) -> tuple[Key, KeyPath]:
    """The key that a pydantic location is in; in a free-form mapping, also the user's own key."""
    end = max(end for end in range(len(location) + 1) if find_key(location[:end]) is not None)
    key = find_key(location[:end])
    assert key is not None
    return key, location[: end + 1] if key.free_form else location[:end]
