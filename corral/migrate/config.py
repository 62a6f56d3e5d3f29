"""A configuration of another system as it was written: YAML files with Hydra's `defaults`, changes to it from a command
line (`a.b=c`, `+a.b=c`, `~a.b`), and OmegaConf's references (`${a.b}`, `${.a}` beside a key, and the few resolvers that
need no code to be run). Nothing in it is ever evaluated.
"""

import copy
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from corral.migrate.outcome import ABSENT, ForeignValue
from corral.migrate.value_kinds import format_value, is_secret
from corral.recipe.document import compose, plain, plain_scalar, read_text
from corral.recipe.errors import RecipeError
from corral.recipe.keys import KeyPath

OVERRIDE = re.compile(r"(?P<sign>\+{0,2}|~)(?P<key>[\w./@,-]+)(?:=(?P<value>.*))?", re.DOTALL)
DEFAULT = re.compile(r"[\w./-]{1,200}")
PACKAGE = re.compile(r"^#\s*@package\s+([\w.]+)", re.MULTILINE)
YAML_BOOLEANS = {"yes": True, "on": True, "no": False, "off": False}
"""What OmegaConf's YAML has for true and false, besides these words."""
ENGINE_CHOICE = re.compile(
    r"(actor|ref|critic)@[\w.]+=(dp|megatron|mlite|veomni|torchtitan|automodel)_\1|(engine|optim)=\w+"
)
"""Choices of verl's files with the settings of a trainer."""
MAX_FILES = 100
MAX_DEPTH = 30
ESCAPED = re.compile(r"""\\([\\,\[\]{}:='" \t])""")
QUOTED = re.compile(r"""(['"])((?:\\.|(?!\1)[^\\])*)\1""", re.DOTALL)
MAX_VALUE_DEPTH = 40
REFERENCE = re.compile(r"\$\{([^${}]*)\}")
MAX_REFERENCE_DEPTH = 60
"""Values that refer to values that refer to values."""
MAX_REFERENCED_SIZE = 200_000
"""Values and characters that references put in: more are a bomb, not a configuration."""
ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    "multiply": operator.mul,
    "add": operator.add,
    "subtract": operator.sub,
    "divide": operator.truediv,
    "int_div": operator.floordiv,
}


class RawConfig:
    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self.variables = dict(variables or {})
        """Environment variables for `${oc.env:NAME}`; none but these are read."""
        self.values: dict[str, Any] = {}
        self.origins: dict[KeyPath, str] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        """What the user should look at."""
        self.missing: list[str] = []
        """Files of the other system that `defaults` name and that are not there: its own, most likely."""
        self.added: set[str] = set()
        """Keys that were written with a `+`: the other system's own configuration does not have them."""
        self.num_files = 0

    def set(self, path: KeyPath, value: Any, where: str) -> None:
        section = self.values
        for name in path[:-1]:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        section[path[-1]] = value
        self.origins[path] = where

    def remove(self, path: KeyPath) -> None:
        section: Any = self.values
        for name in path[:-1]:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(path[-1], None)

    def where(self, path: KeyPath) -> str:
        return next((self.origins[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.origins), "")

    def flat(self) -> dict[str, ForeignValue]:
        """References resolved; what could not be is left out, and in `problems`."""
        references = ReferenceResolver(self)
        given: dict[str, ForeignValue] = {}
        for path, value in leaves((), self.values):
            try:
                # where Hydra looks for files, and what it does with its output, is nothing that a recipe has
                resolved = value if path[0] == "hydra" else references.resolve(path, value)
            except RecipeError as error:
                self.problems += error.problems
                continue
            for below, leaf in leaves(path, resolved):
                key = ".".join(below)
                given[key] = ForeignValue(key, leaf, self.where(below) or ".".join(path), key in self.added)
        named = {target[0] for target in references.found}
        return {key: replace(one, referenced=key.split(".")[0] in named) for key, one in given.items()}


def leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves((*path, str(name)), item)
    elif path:
        yield path, value


# --- files


def add_file(
    config: RawConfig, path: Path, package: KeyPath = (), around: tuple[Path, ...] = (), text: str | None = None
) -> None:
    """A file below `package`, and the files that its `defaults` name, under it or over it as `_self_` says. `text` is
    what counts of a file that has more."""
    config.num_files += 1
    if path.resolve() in [other.resolve() for other in around]:
        raise RecipeError(f"{path}: `defaults` of files name each other in a circle")
    if config.num_files > MAX_FILES:
        raise RecipeError(f"{path}: `defaults` name more than {MAX_FILES} files")
    text = read_text(path) if text is None else text
    node = compose(text, str(path))
    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise RecipeError(f"{path}:{node.start_mark.line + 1}: should be a mapping of keys to values")
    if around and (declared := PACKAGE.search(text)):
        package = package_of(declared[1], package, package)
    for item in defaults_of(node):
        if item == "_self_":
            add_node(config, package, node, str(path))
        else:
            add_default(config, path, item, package, (*around, path))


def defaults_of(node: yaml.MappingNode) -> list[Any]:
    """The `defaults` list with overrides of choices made, and `_self_` at the end unless it has another place."""
    found: Any = next((plain(value) for key, value in node.value if key.value == "defaults"), None) or []
    items: list[Any] = []
    for item in found if isinstance(found, list) else [found]:
        [(group, option)] = item.items() if isinstance(item, dict) and len(item) == 1 else [("", item)]
        overridden = str(group).removeprefix("override ").strip()
        if overridden.startswith(("hydra/", "optional hydra/")):
            continue
        if str(group).startswith("override "):
            items = [one for one in items if not (isinstance(one, dict) and overridden in one)]
            item = {overridden: option}
        items.append(item)
    return items if "_self_" in items else [*items, "_self_"]


def add_default(config: RawConfig, path: Path, item: Any, package: KeyPath, around: tuple[Path, ...]) -> None:
    """`model/qwen@actor.model`, `group: option`, `group@package: option`, `../config/envs@_here_`."""
    if isinstance(item, dict) and len(item) == 1:
        [(group, options)] = item.items()
        group, _, target = str(group).removeprefix("optional ").partition("@")
        names = [f"{group}/{option}" for option in (options if isinstance(options, list) else [options]) if option]
    else:
        name, _, target = str(item).partition("@")
        group, names = name.rpartition("/")[0], [name]
    for name in names:
        if not DEFAULT.fullmatch(name):
            raise RecipeError(f"{path}: `defaults: {format_value(item)}` is not the name of a file")
        file = find_default(name, path, around)
        if file is None:
            config.missing.append(name)
        else:
            own = tuple(part for part in group.strip("/").split("/") if part and part != "..")
            add_file(config, file, package_of(target, package, (*package, *own)), around)


def package_of(written: str, here: KeyPath, usual: KeyPath) -> KeyPath:
    if written in ("_here_", "_global_"):
        return here if written == "_here_" else ()
    return (*here, *written.split(".")) if written else usual


def find_default(name: str, path: Path, around: tuple[Path, ...]) -> Path | None:
    """Beside the file that names it, or beside one of those around; not far from the outermost."""
    root = around[0].parent.resolve()
    folders = [root] if name.startswith("/") else [path.parent, *(other.parent for other in around)]
    for folder in folders:
        file = folder / f"{name.strip('/').removesuffix('.yaml')}.yaml"
        if file.is_file() and file.resolve().is_relative_to(root.parent):
            return file
    return None


def add_node(config: RawConfig, path: KeyPath, node: yaml.MappingNode, file: str) -> None:
    """Dotted keys stand for nested ones, as guides write them."""
    for key_node, value_node in node.value:
        below = (*path, *str(key_node.value).split("."))
        where = f"{file}:{key_node.start_mark.line + 1}"
        if len(below) > MAX_DEPTH:
            raise RecipeError(f"{where}: is nested too deeply")
        if below == (*path, "defaults"):
            continue
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            config.origins[below] = where
            add_node(config, below, value_node, file)
        else:
            value = plain(value_node)
            if isinstance(value_node, yaml.ScalarNode) and value_node.style is None and isinstance(value, str):
                value = YAML_BOOLEANS.get(value.lower(), value)
            config.set(below, value, where)


# --- changes on a command line


def add_override(config: RawConfig, word: str, where: str) -> None:
    match = OVERRIDE.fullmatch(word)
    if match is None or (match["value"] is None and match["sign"] != "~"):
        config.problems.append(f"{where}: `{word[:200]}` is not an override; write `key=value`")
        return
    path = tuple(match["key"].split("."))
    if match["sign"] == "~":
        config.remove(path)
        config.notes.append(f"{where}: `{word}` takes the key away; {match['key']}=null says what is meant")
    elif ENGINE_CHOICE.fullmatch(word):
        config.notes.append(f"{where}: `{word}` chooses a trainer of verl's; Corral has its own")
    elif "@" in match["key"] or "/" in match["key"]:
        config.problems.append(f"{where}: `{word}` chooses a file of the other system, which is not at hand")
    elif "" in path or len(path) > MAX_DEPTH:
        config.problems.append(f"{where}: `{word[:200]}` is not the name of a key")
    else:
        set_value(config, path, match["value"], where, bool(match["sign"]))


def set_value(config: RawConfig, path: KeyPath, written: str, where: str, is_added: bool) -> None:
    try:
        value = read_value(written)
    except RecipeError as error:
        config.problems.append(f"{where}: `{'.'.join(path)}={written[:200]}` cannot be read: {error}")
        return
    for below, leaf in leaves(path, value) if isinstance(value, dict) else [(path, value)]:
        config.set(below, leaf, where)
        if is_added:
            config.added.add(".".join(below))


# --- values on a command line: texts, numbers, `[a,b]`, `{a:1}`, quotes, and `${...}`, which stays as it is


def read_value(written: str) -> Any:
    """Raises a RecipeError where brackets or quotes are left open."""
    text = written.strip()
    if text[:1] not in ("[", "{", "'", '"'):
        return plain_scalar(unescaped(text)) if text else ""
    reader = _ValueReader(text)
    value = reader.value(0)
    if reader.at < len(text):
        if text[0] in "'\"":
            return written
        raise RecipeError("there is more behind the closing bracket")
    return value


def unescaped(text: str) -> str:
    return ESCAPED.sub(r"\1", text)


class _ValueReader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def value(self, depth: int) -> Any:
        if depth > MAX_VALUE_DEPTH:
            raise RecipeError("is nested too deeply")
        match self._next():
            case "[":
                return [item for _, item in self._items("]", depth)]
            case "{":
                return dict(self._items("}", depth))
            case "'" | '"':
                return self._quoted()
        return plain_scalar(unescaped(self._until(",]}").strip()))

    def _items(self, closing: str, depth: int) -> list[tuple[str, Any]]:
        self.at += 1
        items: list[tuple[str, Any]] = []
        while self._next() != closing:
            items.append((self._key() if closing == "}" else "", self.value(depth + 1)))
            if self._next() == ",":
                self.at += 1
            elif self._next() != closing:
                raise RecipeError(f"a {closing} is missing")
        self.at += 1
        return items

    def _key(self) -> str:
        key = self._quoted() if self._next() in ("'", '"') else self._until(":,]}").strip()
        if self._next() != ":":
            raise RecipeError("a : is missing")
        self.at += 1
        return key

    def _quoted(self) -> str:
        match = QUOTED.match(self.text, self.at)
        if match is None:
            raise RecipeError(f"a {self.text[self.at]} is not closed")
        self.at = match.end()
        return match[2].replace(f"\\{match[1]}", match[1]).replace("\\\\", "\\")

    def _until(self, ends: str) -> str:
        """The text up to one of `ends` that is not inside `${...}`."""
        start, depth = self.at, 0
        while self.at < len(self.text) and (depth or self.text[self.at] not in ends):
            if self.text.startswith("${", self.at):
                depth += 1
                self.at += 1
            elif self.text[self.at] == "}":
                depth -= 1
            elif self.text[self.at] == "\\":
                self.at += 1
            self.at += 1
        return self.text[start : self.at]

    def _next(self) -> str:
        """The next character that is not a space."""
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1]


# --- references


class ReferenceResolver:
    def __init__(self, config: RawConfig) -> None:
        self.config = config
        self.open: list[KeyPath] = []
        self.found: dict[KeyPath, Any] = {}
        self.put_in = 0

    def resolve(self, path: KeyPath, value: Any) -> Any:
        """Raises a RecipeError with one line."""
        if isinstance(value, list):
            return [self.resolve((*path, str(place)), item) for place, item in enumerate(value)]
        if isinstance(value, dict):
            return {name: self.resolve((*path, name), item) for name, item in value.items()}
        if not isinstance(value, str) or "${" not in value:
            return value
        if path in self.open:
            circle = [*self.open[self.open.index(path) :], path]
            raise self.problem(path, f"values refer to each other in a circle: {' -> '.join(map('.'.join, circle))}")
        if len(self.open) > MAX_REFERENCE_DEPTH:
            raise self.problem(path, "refers to values that refer to values, too deeply")
        self.open.append(path)
        try:
            return self._text(path, value)
        finally:
            self.open.pop()

    def _text(self, path: KeyPath, value: str) -> Any:
        """A text with its references put in, the innermost first, so that `${a.${b}}` works."""
        while (match := REFERENCE.search(value)) is not None:
            found = self._reference(path, match[1].strip())
            if match.span() == (0, len(value)):
                return found
            if isinstance(found, dict | list):
                raise self.problem(path, f"`${{{match[1]}}}` cannot be put into a text")
            value = value[: match.start()] + str(found) + value[match.end() :]
            self._count(path, value)
        return value

    def _reference(self, path: KeyPath, name: str) -> Any:
        resolver, colon, arguments = name.partition(":")
        if colon:
            return self._resolver(path, resolver, [part.strip() for part in arguments.split(",")])
        target = absolute(path, name)
        found = self._look_up(target)
        if found is ABSENT and self.config.missing:
            self.config.notes.append(f"`${{{name}}}` may be in a file that is not there: it counts as null")
            return None
        if found is ABSENT:
            raise self.problem(path, f"`${{{name}}}` refers to a key that is not there")
        return self._value(path, target, found)

    def _value(self, path: KeyPath, target: KeyPath, found: Any) -> Any:
        if target not in self.found:
            self.found[target] = self.resolve(target, found)
        self._count(path, self.found[target])
        return copy.deepcopy(self.found[target])

    def _count(self, path: KeyPath, value: Any) -> None:
        self.put_in += size_of(value)
        if self.put_in > MAX_REFERENCED_SIZE:
            raise self.problem(path, "has too many references in it")

    def _look_up(self, target: KeyPath) -> Any:
        found: Any = self.config.values
        for end, part in enumerate(target):
            if isinstance(found, str):
                found = self.resolve(target[:end], found)
            if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict) and part in found:
                found = found[part]
            else:
                return ABSENT
        return found

    def _resolver(self, path: KeyPath, resolver: str, arguments: list[str]) -> Any:
        first = absolute(path, arguments[0])
        if resolver == "oc.select":
            found = self._look_up(first)
            if found is ABSENT:
                return read_value(arguments[1]) if len(arguments) > 1 else None
            return self._value(path, first, found)
        if resolver == "oc.env":
            return self._variable(path, *arguments)
        if resolver == "not":
            found = self._look_up(first)
            value = read_value(arguments[0]) if found is ABSENT else self._value(path, first, found)
            return str(value).lower() in ("false", "none", "null", "0", "")
        if resolver in ARITHMETIC:
            try:
                result = ARITHMETIC[resolver](*map(float, arguments))
                return int(result) if result == int(result) else result
            except (ValueError, TypeError, ArithmeticError):
                raise self.problem(path, f"`{resolver}:{','.join(arguments)}` cannot be worked out") from None
        if resolver in ("now", "hydra"):
            self.config.notes.append(
                f"`{'.'.join(path)}`: `${{{resolver}:...}}` is left out; each run would be another"
            )
            return ""
        raise self.problem(path, f"`${{{resolver}:...}}` would run code of the other system; write its value")

    def _variable(self, path: KeyPath, name: str, *default: str) -> Any:
        if name in self.config.variables:
            return read_value(self.config.variables[name])
        if default:
            return read_value(default[0])
        if is_secret(name):
            return None
        raise self.problem(path, f"needs ${name}, and the environment is not read; give it with --define {name}=VALUE")

    def problem(self, path: KeyPath, what: str) -> RecipeError:
        return RecipeError(f"{self.config.where(path)}: `{'.'.join(path)}` {what}")


def absolute(path: KeyPath, name: str) -> KeyPath:
    """`.b` is beside the key at `path`, `..b` one level up; `a[0]` is `a.0`."""
    name = re.sub(r"\[(\w+)\]", r".\1", name)
    inner = name.lstrip(".")
    dots = len(name) - len(inner)
    above = path[: max(len(path) - dots, 0)] if dots else ()
    return (*above, *inner.split("."))


def size_of(value: Any) -> int:
    if isinstance(value, dict | list):
        return 1 + sum(map(size_of, value.values() if isinstance(value, dict) else value))
    return 1 + len(value) // 10 if isinstance(value, str) else 1
