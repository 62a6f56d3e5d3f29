"""A recipe file as written, with overrides: nested values, and for every key the place where it was written.

Reads YAML 1.2's core types, so `1e-6` is a number, `no` is a word and `2024-01-01` is not a date. Dotted keys stand for
nested ones. What the keys mean, and whether they exist, is not decided here.
"""

import json
import re
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from corral.recipe.errors import RecipeError
from corral.recipe.keys import PLACEMENT, KeyPath, dotted, expand, find_key, in_free_form, nearest

NULLS = {"", "~", "null", "Null", "NULL"}
BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
INTEGER = re.compile(r"[-+]?[0-9]{1,300}(_[0-9]{1,300})*|0x[0-9a-fA-F]{1,300}|0o[0-7]{1,300}")
REAL = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
NOT_FINITE = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

MOST_NODES = 200_000
OVERRIDE = float("inf")
"""The line of what was not written in the file."""
MAX_BYTES = 1 << 20
"""Longest recipe: the parser takes many times as much memory."""


class Where(NamedTuple):
    """Sorts in the order of the file, overrides last."""

    line: float
    text: str


@dataclass
class Document:
    file: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, Where] = field(default_factory=dict)
    problems: list[tuple[Where, str]] = field(default_factory=list)
    broken: set[KeyPath] = field(default_factory=set)
    """Keys whose value could not be worked out; already reported."""

    def where(self, path: KeyPath) -> Where:
        """Of the key, or of the nearest section around it."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.origins:
                return self.origins[path[:end]]
        return Where(0, self.file)

    def report(self, where: Where, message: str) -> None:
        if (where, message) not in self.problems:
            self.problems.append((where, message))

    def raise_problems(self) -> None:
        if self.problems:
            in_order = sorted(self.problems, key=lambda problem: problem[0].line)
            raise RecipeError(f"{where.text}: {message}" for where, message in in_order)

    def add(self, path: KeyPath, node: yaml.Node, where: Where) -> None:
        """A key that must not have been given before."""
        if path in self.origins:
            self.report(where, f"`{dotted(path)}` is given twice (first at {self.origins[path].text})")
        elif isinstance(node, yaml.MappingNode):
            if self.put_section(path, where):
                self.add_keys(path, node, where)
        elif is_part(path):  # `loss: sapo` is `loss: {name: sapo}`
            if self.put_section(path, where):
                self.add((*path, "name"), node, where)
        else:
            self.put(path, plain(node), where)

    def add_keys(self, path: KeyPath, node: yaml.MappingNode, where: Where | None = None) -> None:
        """What is below `path`; each key at its own line, or all at the override that they came with."""
        for key_node, value_node in node.value:
            key = key_text(key_node)
            below = (*path, key) if in_free_form(path) else expand(path, key)
            self.add(below, value_node, self._line(key_node, where))

    def _line(self, node: yaml.Node, where: Where | None) -> Where:
        if where is not None and where.line == OVERRIDE:
            return where
        line = node.start_mark.line + 1
        return Where(line, f"{self.file}:{line}")

    def put(self, path: KeyPath, value: Any, where: Where) -> bool:
        """Set a value. False, and reported, where another kind of value is in the way."""
        parent = self._section(path, path[:-1], where)
        if parent is None:
            return False
        if isinstance(parent.get(path[-1]), dict):
            return self._contradiction(path, path, where)
        parent[path[-1]] = value
        self.origins[path] = where
        return True

    def put_section(self, path: KeyPath, where: Where) -> bool:
        if self._section(path, path, where) is None:
            return False
        self.origins[path] = where
        return True

    def _section(self, wanted: KeyPath, path: KeyPath, where: Where) -> dict[str, Any] | None:
        """The mapping at `path`, made where there is none yet."""
        section = self.values
        for end, name in enumerate(path, start=1):
            if section.get(name) is None:
                section[name] = {}
            if not isinstance(section[name], dict):
                self._contradiction(wanted, path[:end], where)
                return None
            section = section[name]
        return section

    def _contradiction(self, path: KeyPath, other: KeyPath, where: Where) -> bool:
        there = next(place for known, place in self.origins.items() if known[: len(other)] == other)
        self.report(
            where, f"`{dotted(path)}` cannot be set: {there.text} gives `{dotted(other)}` another kind of value"
        )
        return False

    def remove(self, path: KeyPath) -> bool:
        """Removes a key and all below it. False when it is not there."""
        parent: Any = self.values
        for name in path[:-1]:
            parent = parent.get(name) if isinstance(parent, dict) else None
        if not isinstance(parent, dict) or path[-1] not in parent:
            return False
        del parent[path[-1]]
        self.origins = {known: where for known, where in self.origins.items() if known[: len(path)] != path}
        return True

    def remove_from_file(self, path: KeyPath) -> None:
        """Removes what the file says below a key; what overrides say stays."""
        for known, where in list(self.origins.items()):
            if known[:-1] == path and where.line != OVERRIDE:
                self.remove(known)


def is_part(path: KeyPath) -> bool:
    key = find_key(path)
    return key is not None and key.is_part


def read_document(path: Path) -> Document:
    return parse_document(read_text(path), str(path))


def parse_document(text: str, source: str) -> Document:
    """`source`: the file that messages name."""
    node = compose(text, source)
    if node is None:
        raise RecipeError(f"{source}: the file is empty")
    if not isinstance(node, yaml.MappingNode):
        raise RecipeError(f"{source}:{node.start_mark.line + 1}: a recipe is a mapping of keys to values (`name: ...`)")
    document = Document(source)
    document.add_keys((), node)
    return document


def read_text(path: Path) -> str:
    try:
        if (size := path.stat().st_size) > MAX_BYTES:
            raise RecipeError(f"{path}: has {size} bytes, and a recipe has at most {MAX_BYTES}; is it one?")
        with path.open(encoding="utf-8-sig") as file:  # a device has no size, and no end
            if len(text := file.read(MAX_BYTES + 1)) > MAX_BYTES:
                raise RecipeError(f"{path}: does not end after {MAX_BYTES} characters; is it a recipe?")
        return text
    except FileNotFoundError:
        there = [file.name for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        near = nearest(path.name, there)
        hint = f"; did you mean {path.parent / near}?" if near else ""
        raise RecipeError(f"{path}: no such file{hint}") from None
    except IsADirectoryError:
        raise RecipeError(f"{path}: is a folder, not a recipe file") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: is not a text file in UTF-8") from None
    except ValueError:  # half a surrogate pair, a null
        raise RecipeError(f"{str(path)!a}: no file can have this name") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None


def compose(text: str, source: str, loader: type[yaml.BaseLoader] = yaml.BaseLoader) -> yaml.Node | None:
    """YAML text as nodes with positions; a syntax error as one line."""
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        raise RecipeError(f"{source}{syntax_problem(error, text)}") from None
    except RecursionError:
        raise RecipeError(f"{source}: is nested too deeply") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{source}: is not valid YAML: {str(error).splitlines()[0]}") from None
    if node is not None:
        _refuse_extras(node, source, (), count())
    return node


def syntax_problem(error: yaml.MarkedYAMLError, text: str) -> str:
    """`:line: what is wrong`, with what is most likely to have caused it."""
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return f": is not valid YAML: {error.problem}"
    line = [*text.splitlines(), ""][min(mark.line, len(text.splitlines()))]
    hint = ""
    if "\t" in line:
        hint = " (indent with spaces, not tabs)"
    elif "${" in line:
        hint = " (inside [ ] and { }, put `${...}` in quotes)"
    return f":{mark.line + 1}: is not valid YAML: {error.problem or error.context}{hint}"


def _refuse_extras(node: yaml.Node, source: str, around: tuple[yaml.Node, ...], seen: "count[int]") -> None:
    """Tags, merge keys, keys that are not text, anchors that contain themselves or multiply: a recipe has no use for
    them."""
    where = f"{source}:{node.start_mark.line + 1}"
    if next(seen) > MOST_NODES:
        raise RecipeError(f"{where}: aliases make more than {MOST_NODES} values of this")
    if any(node is outer for outer in around):
        raise RecipeError(f"{where}: an anchor contains an alias to itself")
    if node.tag.rpartition(":")[2] not in ("str", "seq", "map"):
        raise RecipeError(f"{where}: YAML tags are not used in recipes")
    if isinstance(node, yaml.MappingNode):
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise RecipeError(f"{where}: a key must be text")
            if key.value == "<<" and not key.style:
                raise RecipeError(
                    f"{where}: merge keys (`<<`) are not used in recipes; refer to a value with `${{a.b}}`"
                )
        keys = [key_text(key) for key, _ in node.value]
        if len(set(keys)) < len(keys) and any(isinstance(outer, yaml.SequenceNode) for outer in around):
            raise RecipeError(f"{where}: a key is given twice in this mapping")
    if not isinstance(node, yaml.ScalarNode):
        for part in node.value:
            for child in part if isinstance(part, tuple) else (part,):
                _refuse_extras(child, source, (*around, node), seen)


def plain(node: yaml.Node) -> Any:
    """A node as plain Python values."""
    if isinstance(node, yaml.MappingNode):
        return {key_text(key): plain(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [plain(item) for item in node.value]
    assert isinstance(node, yaml.ScalarNode)
    return node.value if node.style else plain_scalar(node.value)


def key_text(node: yaml.Node) -> str:
    return str(node.value)


def plain_scalar(text: str) -> Any:
    """An unquoted scalar. A whole number in scientific notation (`1e4`) is an integer."""
    if text in NULLS:
        return None
    if text in BOOLS:
        return BOOLS[text]
    if INTEGER.fullmatch(text):
        return int(text, 0) if text.startswith(("0x", "0o")) else int(text)
    if REAL.fullmatch(text):
        number = float(text)
        return int(number) if "." not in text and number.is_integer() else number
    if match := NOT_FINITE.fullmatch(text):
        return float(f"{match[1]}inf") if match[2] else float("nan")
    return text


def show(value: Any) -> str:
    """A value as one would write it in YAML, on one line."""
    text = value if isinstance(value, str) and plain_scalar(value) == value else json.dumps(value, ensure_ascii=False)
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."


# --- overrides


def apply_override(document: Document, text: str) -> None:
    """A change from the command line: `a.b=c` sets (as does Hydra's `+a.b=c`), `~a.b` deletes."""
    where = Where(OVERRIDE, f"override {text}")
    if text.startswith("~"):
        path = expand((), text[1:].strip())
        if not document.remove(path):
            document.report(where, f"`{dotted(path)}` is not set in {document.file}, so it cannot be deleted")
        return
    key, equals, value = text.lstrip("+").partition("=")
    if not equals or not key.strip():
        document.report(where, "is not an override; write `key=value`, or `~key` to delete")
        return
    set_override(document, expand((), key.strip()), value, where)


def set_override(document: Document, path: KeyPath, value: str, where: Where) -> None:
    """Set one key to a value in YAML, in place of what the file or an earlier override says."""
    try:
        node = read_value(path, value)
    except RecipeError:
        document.report(where, "the value is not valid YAML; put it in quotes if it is text")
        document.broken.add(path)
        return
    if is_part(path) and not isinstance(node, yaml.MappingNode):
        document.remove_from_file(path)  # options of another part; those of overrides are meant for this one
        path = (*path, "name")
    document.remove(path)
    document.add(path, node, where)


def read_value(path: KeyPath, text: str) -> yaml.Node:
    """As YAML; but a key that takes text only takes it as it stands, unless it is in quotes or null."""
    key = find_key(path)
    if key is not None and key.text_only and not text.startswith(("'", '"')) and text.strip() not in NULLS:
        return as_text(text)
    try:
        node = compose(text, "override")
    except RecipeError:
        if path[:-1] == PLACEMENT or (key is not None and key.takes_text):
            return as_text(text)
        raise
    if node is None:
        return yaml.ScalarNode("tag:yaml.org,2002:str", "")
    if isinstance(node, yaml.MappingNode) and not text.lstrip().startswith("{"):
        return as_text(text)  # `key: value` after an equals sign is a sentence with a colon
    return node


def as_text(text: str) -> yaml.Node:
    return yaml.ScalarNode("tag:yaml.org,2002:str", text, style="'")
