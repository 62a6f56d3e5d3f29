"""Writes the tables of the documentation that follow from the code: every key of the recipe, every part of algorithms.

    python docs/generate_recipe_reference.py

A table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; the text around it is written by hand.
`tests/recipe/test_reference_is_current.py` fails when a table is not what this program would write.
"""

import ast
import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from corral.algorithms.declarations import AdvantageDeclaration, Declaration, LossDeclaration, format_option
from corral.loop.resuming import ON_RESUME
from corral.recipe.keys import ANY, Key, KeyPath, all_keys, describe, dotted
from corral.recipe.parts import KINDS, PRESETS
from corral.recipe.presets import resolve_algorithm
from corral.recipe.schema import PartChoice, Recipe

DOCS = Path(__file__).parent


def main() -> None:
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")


def generated() -> dict[Path, str]:
    """The documents as they should be, by file."""
    tables: dict[str, Callable[[], str]] = {"presets": preset_table}
    for path, kind in KINDS.items():
        name = {"loss": "losses"}.get(path[-1], f"{path[-1]}s")
        tables[name] = lambda noun=kind.noun, declared=kind.declared: part_table(noun, declared)
    return {
        DOCS / "recipe.md": with_tables("recipe.md", {"keys": key_tables}),
        DOCS / "algorithms.md": with_tables("algorithms.md", tables),
        DOCS / "runs-and-checkpoints.md": with_tables("runs-and-checkpoints.md", {"resume": resume_table}),
    }


def with_tables(file: str, tables: Mapping[str, Callable[[], str]]) -> str:
    text = (DOCS / file).read_text(encoding="utf-8")
    for name, make in tables.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        pattern = re.compile(f"{begin}.*?{end}", re.DOTALL)
        assert len(pattern.findall(text)) == 1, f"{file} must have one place for the table `{name}`"
        text = pattern.sub(lambda _, table=f"{begin}\n\n{make()}\n\n{end}": table, text)
    return text


def table(header: list[str], rows: list[list[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *escaped))


# --- keys of the recipe


def resume_table() -> str:
    """What becomes of a changed key when a run goes on; sections without their exceptions."""
    keys: dict[str, list[str]] = {}
    for key, rule in ON_RESUME.items():
        keys.setdefault(rule, []).append(f"`{key}`")
    return table(["a change of", "is"], [[", ".join(own), rule] for rule, own in keys.items()])


def key_tables() -> str:
    """A table for the keys at the top, and one for each section."""
    sections = [(), *(key.path for key in all_keys().values() if key.section is not None)]
    return "\n\n".join(key_table(section) for section in sections)


def key_table(section: KeyPath) -> str:
    keys = [key for key in all_keys().values() if key.path[:-1] == section and key.section is None]
    title, introduction = "### At the top", "The other keys at the top are the sections below."
    if section:
        key = all_keys()[section]
        title, introduction = f"### `{dotted(section)}`", meaning(key)
        if key.optional:
            introduction += " The whole section may be left out."
    if section in KINDS:
        short = dotted((section[-1],))
        introduction += f" `{short}: NAME` is short for `{short}: {{name: NAME}}`."
        rows = [part_row(section, key) for key in keys]
    else:
        rows = [[f"`{dotted(key.path)}`", value_of(key), default(key), meaning(key)] for key in keys]
    parts = [title, introduction]
    return "\n\n".join([*parts, table(["key", "value", "default", "meaning"], rows)] if rows else parts)


def part_row(section: KeyPath, key: Key) -> list[str]:
    """The name of a part, or an option that one or several of the parts have."""
    kind = KINDS[section]
    if key.path[-1] == "name":
        names = ", ".join(kind.declared) + (", or `file.py:function`" * (kind.of_a_user is not None))
        return [f"`{dotted(key.path)}`", names, "see above", f"Which {kind.noun}."]
    owners = {name: one for name, one in kind.declared.items() if key.path[-1] in one.option_names}
    defaults = {name: option_default(declared, key.path[-1]) for name, declared in owners.items()}
    meanings = {name: not_set(field_texts(declared.options)[key.path[-1]]) for name, declared in owners.items()}
    return [
        f"`{dotted(key.path)}`",
        value_of(key),
        next(iter(defaults.values())) if len(set(defaults.values())) == 1 else by_owner(defaults, "{} ({})", ", "),
        by_owner(meanings, "{1}: {0}" if len(owners) < len(kind.declared) else "{}", " "),
    ]


def by_owner(values: Mapping[str, str], form: str, separator: str) -> str:
    """Each of the values once, with the names of those that have it."""
    owners: dict[str, list[str]] = {}
    for name, value in values.items():
        owners.setdefault(value, []).append(name)
    return separator.join(form.format(value, ", ".join(names)) for value, names in owners.items())


def option_default(declared: Declaration, option: str) -> str:
    (field,) = (field for field in dataclasses.fields(declared.options) if field.name == option)
    if "recipe_key" in field.metadata:
        return f"`{field.metadata['recipe_key']}`"
    return "not set" if field.default is None else f"`{format_option(field.default)}`"


def value_of(key: Key) -> str:
    if key.free_form:
        return "a section with keys of your own"
    if key.named_sections:
        return "sections with names of your own"
    text = describe(key.annotation).removesuffix(" or null").removeprefix("one of ")
    return re.sub(r"\ba whole number, at least 1$", "a whole number from 1", text)


def default(key: Key) -> str:
    if key.required:
        return "required"
    value = key.default
    return "not set" if value is None else f"`{value}`" if isinstance(value, str) else f"`{json.dumps(value)}`"


def meaning(key: Key) -> str:
    """The text under the field in the schema; of a section without one, its class's."""
    above = Recipe if len(key.path) == 1 else all_keys()[key.path[:-1]].section
    text = field_texts(above).get(key.path[-1]) if above is not None and key.path[-1] != ANY else None
    if text is None and key.section is not None and key.section is not PartChoice:
        text = one_line(inspect.getdoc(key.section) or "")
    assert text, f"nothing says what `{dotted(key.path)}` means"
    return not_set(text)


def not_set(text: str) -> str:
    return text.replace("None: ", "Not set: ")


@cache
def field_texts(owner: type[Any]) -> dict[str, str]:
    """The texts under the fields of a class, and of those that it inherits from."""
    texts: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if not base.__module__.startswith("corral."):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for statement, following in zip(node.body, node.body[1:], strict=False):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[name] = one_line(text)
    return texts


def one_line(text: str) -> str:
    return " ".join(text.split())


# --- algorithms


def preset_table() -> str:
    rows = []
    for name in PRESETS:
        resolved = resolve_algorithm(recipe_with(name))
        besides = []
        if resolved.kl is not None:
            numbers = f"{resolved.kl.estimator.name}, {resolved.kl.coefficient:g}"
            besides.append(f"KL in the {resolved.kl.where} ({numbers}), so a reference model")
        besides += ["a reference model"] * resolved.loss.declaration.needs_reference
        besides += ["a critic"] * resolved.needs_critic
        besides += ["a greedy answer to each prompt"] * resolved.needs_greedy_baseline
        besides += ["dynamic sampling"] * resolved.dynamic_sampling
        besides += [f"{option} {value:g}" for option, value in PRESETS[name].loss_options.items()]
        parts = [resolved.advantage.name, resolved.loss.name, resolved.aggregation.name]
        rows.append([f"`{name}`", *parts, "; ".join(besides)])
    return table(["`algorithm.name`", "advantage", "loss", "aggregation", "besides"], rows)


def recipe_with(algorithm: str) -> Recipe:
    return Recipe.model_validate(
        {"name": "x", "model": {"path": "x"}, "data": {"train": {"path": "x"}}, "algorithm": {"name": algorithm}}
    )


def part_table(noun: str, declared: Mapping[str, Declaration]) -> str:
    """One row for each part: what it is, its options with their defaults, what it needs, and its paper."""
    columns: dict[str, Callable[[Declaration], str]] = {
        noun: lambda one: f"`{one.name}`",
        "what it is": lambda one: one.summary,
        "options": lambda one: ", ".join(f"{name} {option_default(one, name)}" for name in one.option_names),
        "needs": needs_text,
        "paper": paper_text,
    }
    cells = {title: [text(one) for one in declared.values()] for title, text in columns.items()}
    shown = [title for title, column in cells.items() if any(column)]
    return table(shown, [list(row) for row in zip(*(cells[title] for title in shown), strict=True)])


def needs_text(declared: Declaration) -> str:
    if isinstance(declared, LossDeclaration):
        needs = [f"aggregation {declared.aggregation}"] if declared.aggregation else []
        needs += ["pairs of answers"] * declared.trains_on_pairs + ["a reference"] * declared.needs_reference
        return ", ".join(needs)
    if isinstance(declared, AdvantageDeclaration):
        needs = dataclasses.asdict(declared.needs)
        return ", ".join(name.replace("_", " ") for name, needed in needs.items() if needed)
    return ""


def paper_text(declared: Declaration) -> str:
    found = re.findall(r"arXiv (\d{4}\.\d{5})", declared.function.__doc__ or "")
    return ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in dict.fromkeys(found))


if __name__ == "__main__":
    main()
