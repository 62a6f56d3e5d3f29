"""A configuration of another system as it was written: YAML files with Hydra's `defaults`, changes to it from a command
line (`a.b=c`, `+a.b=c`, `~a.b`), and OmegaConf's references (`${a.b}`). Nothing in it is ever evaluated.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from corral.recipe.dialects.table import Given, show
from corral.recipe.document import compose, plain, plain_scalar, read_text
from corral.recipe.errors import RecipeError
from corral.recipe.keys import KeyPath

OVERRIDE = re.compile(r"(?P<sign>\+{0,2}|~)(?P<key>[\w./@,-]+)(?:=(?P<value>.*))?", re.DOTALL)
REFERENCE = re.compile(r"\$\{([^${}]*)\}")
PLAIN = re.compile(r"[\w./+-]*")
"""A value in which nothing has a meaning to YAML; most are."""
MOST_REFERENCES = 10_000
"""Values that refer to values that refer to values: more are a bomb, not a configuration."""
DEFAULTS_ITEM = re.compile(r"(?P<group>[\w./-]+)(?:@(?P<package>[\w.-]+))?")


class Config:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[KeyPath, str] = {}
        self.problems: list[str] = []
        self.missing: list[str] = []
        """Files of the other system that `defaults` name and that are not there: its own, most likely."""

    def set(self, path: KeyPath, value: Any, where: str) -> None:
        section = self.values
        for name in path[:-1]:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        section[path[-1]] = value
        self.origins[path] = where

    def remove(self, path: KeyPath) -> bool:
        section: Any = self.values
        for name in path[:-1]:
            section = section.get(name) if isinstance(section, dict) else None
        return isinstance(section, dict) and section.pop(path[-1], self) is not self

    def where(self, path: KeyPath) -> str:
        return next((self.origins[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.origins), "")

    def flat(self) -> dict[str, Given]:
        """References resolved. Raises a RecipeError with all problems."""
        references = _References(self)
        given: dict[str, Given] = {}
        for path, value in leaves((), self.values):
            key = ".".join(path)
            try:
                resolved = references.resolve(path, value)
            except RecipeError as error:
                self.problems += error.problems
                continue
            for below, leaf in leaves(path, resolved):
                given[".".join(below)] = Given(".".join(below), leaf, self.where(below) or key)
        if self.problems:
            raise RecipeError(dict.fromkeys(self.problems))
        return given


def leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves((*path, str(name)), item)
    elif path:
        yield path, value


# --- files


def add_file(config: Config, path: Path, around: tuple[Path, ...] = ()) -> None:
    """A file and those that its `defaults` name."""
    if path in around:
        raise RecipeError(f"{path}: `defaults` of files name each other in a circle")
    node = compose(read_text(path), str(path))
    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise RecipeError(f"{path}:{node.start_mark.line + 1}: should be a mapping of keys to values")
    defaults: Any = next((plain(value) for key, value in node.value if key.value == "defaults"), [])
    for item in defaults if isinstance(defaults, list) else [defaults]:
        if item != "_self_":
            add_default(config, path, item, (*around, path))
    add_node(config, (), node, str(path))
    config.remove(("defaults",))


def add_default(config: Config, path: Path, item: Any, around: tuple[Path, ...]) -> None:
    """`model/qwen@actor.model`, `group: option`, `group@package: option`, `../config/envs@_here_`."""
    if isinstance(item, dict) and len(item) == 1:
        [(group, option)] = item.items()
        if str(group).startswith(("override ", "optional hydra")) or option is None:
            return
        name = f"{group.split('@')[0].removeprefix('optional ')}/{option}"
        package = group.partition("@")[2]
    else:
        name, _, package = str(item).partition("@")
    match = DEFAULTS_ITEM.fullmatch(name)
    if match is None:
        raise RecipeError(f"{path}: `defaults: {show(item)}` is not a file")
    for folder in (path.parent, *(other.parent for other in around)):
        file = folder / f"{name.removesuffix('.yaml')}.yaml"
        if file.is_file():
            inner = Config()
            add_file(inner, file, around)
            config.missing += inner.missing
            prefix = () if package in ("", "_here_", "_global_") else tuple(package.split("."))
            for below, value in leaves((), inner.values):
                config.set((*prefix, *below), value, inner.where(below))
            return
    config.missing.append(name)


def add_node(config: Config, path: KeyPath, node: yaml.MappingNode, file: str) -> None:
    """Dotted keys stand for nested ones, as guides write them."""
    for key_node, value_node in node.value:
        below = (*path, *str(key_node.value).split("."))
        where = f"{file}:{key_node.start_mark.line + 1}"
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            config.origins[below] = where
            add_node(config, below, value_node, file)
        else:
            config.set(below, plain(value_node), where)


# --- changes on a command line


def add_override(config: Config, word: str, where: str) -> None:
    match = OVERRIDE.fullmatch(word)
    if match is None or (match["value"] is None and match["sign"] != "~"):
        config.problems.append(f"{where}: `{word}` is not an override; write `key=value`")
        return
    path = tuple(match["key"].split("."))
    if match["sign"] == "~":
        config.remove(path)
        return
    if "" in path or "@" in match["key"] or "/" in match["key"]:
        config.problems.append(f"{where}: `{word}` chooses a file of the other system, which is not at hand")
        return
    try:
        value = read_value(match["value"])
    except RecipeError:
        config.problems.append(f"{where}: `{word}`: the value cannot be read; are its brackets and quotes closed?")
        return
    if isinstance(value, dict) and value:
        for below, leaf in leaves(path, value):
            config.set(below, leaf, where)
    else:
        config.set(path, value, where)


def read_value(written: str) -> Any:
    """As Hydra reads it, near enough: YAML on one line, where `a: b` is a text."""
    if PLAIN.fullmatch(written):
        return plain_scalar(written) if written else ""
    try:
        node = compose(written, "override")
    except RecipeError:
        if written[:1] in "[{'\"":
            raise
        return written
    if node is None or (isinstance(node, yaml.MappingNode) and written[:1] != "{"):
        return written
    return plain(node)


# --- references


class _References:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.open: list[KeyPath] = []
        self.followed = 0

    def resolve(self, path: KeyPath, value: Any) -> Any:
        if isinstance(value, list):
            return [self.resolve(path, item) for item in value]
        if isinstance(value, dict):
            return {name: self.resolve((*path, name), item) for name, item in value.items()}
        if not isinstance(value, str) or "${" not in value:
            return value
        if path in self.open:
            circle = [*self.open[self.open.index(path) :], path]
            raise self.problem(path, f"values refer to each other in a circle: {' -> '.join(map('.'.join, circle))}")
        self.open.append(path)
        try:
            return self._text(path, value)
        finally:
            self.open.pop()

    def _text(self, path: KeyPath, value: str) -> Any:
        """Innermost references first, so that `${a.${b}}` works."""
        while (match := REFERENCE.search(value)) is not None:
            self.followed += 1
            if self.followed > MOST_REFERENCES or len(value) > 100_000:
                raise self.problem(path, "has too many references in it")
            found = self._reference(path, match[1].strip())
            if match.span() == (0, len(value)):
                return found
            if isinstance(found, dict | list):
                raise self.problem(path, f"`${{{match[1]}}}` cannot be put into a text")
            value = value[: match.start()] + show(found) + value[match.end() :]
        return value

    def _reference(self, path: KeyPath, name: str) -> Any:
        resolver, colon, arguments = name.partition(":")
        if colon:
            return self._resolver(path, resolver, [part.strip() for part in arguments.split(",")])
        target = tuple(name.split("."))
        if name.startswith("."):
            dots = len(name) - len(name.lstrip("."))
            target = (*path[: max(len(path) - dots, 0)], *name.lstrip(".").split("."))
        found = self._look_up(target)
        if found is self and self.config.missing:
            return None
        if found is self:
            raise self.problem(path, f"`${{{name}}}` refers to a key that is not there")
        return copy.deepcopy(self.resolve(target, found))

    def _look_up(self, target: KeyPath) -> Any:
        found: Any = self.config.values
        for end, part in enumerate(target):
            if isinstance(found, str):
                found = self.resolve(target[:end], found)
            if not isinstance(found, dict) or part not in found:
                return self
            found = found[part]
        return found

    def _resolver(self, path: KeyPath, resolver: str, arguments: list[str]) -> Any:
        if resolver == "oc.select":
            found = self._look_up(tuple(arguments[0].split(".")))
            if found is not self:
                return self.resolve(tuple(arguments[0].split(".")), found)
            return read_value(arguments[1]) if len(arguments) > 1 else None
        if resolver == "oc.env":
            if len(arguments) > 1:
                return read_value(arguments[1])
            raise self.problem(
                path, f"needs the environment variable {arguments[0]}, which is not read here; write it out"
            )
        if resolver == "not":
            named = self._look_up(tuple(arguments[0].split(".")))
            value = read_value(arguments[0]) if named is self else self.resolve(tuple(arguments[0].split(".")), named)
            return str(value).lower() in ("false", "none", "0", "")
        if resolver in ARITHMETIC:
            try:
                numbers = [float(part) for part in arguments]
                result = ARITHMETIC[resolver](*numbers)
            except (ValueError, TypeError, ArithmeticError):
                raise self.problem(path, f"`{resolver}:{','.join(arguments)}` cannot be worked out") from None
            return int(result) if result == int(result) else result
        if resolver in ("now", "hydra"):
            return f"{resolver}-{'-'.join(arguments)}".replace("%", "").replace("/", "-").replace(":", "-")
        raise self.problem(path, f"`${{{resolver}:...}}` would run code of the other system; write its value")

    def problem(self, path: KeyPath, what: str) -> RecipeError:
        return RecipeError(f"{self.config.where(path)}: `{'.'.join(path)}` {what}")


ARITHMETIC: Mapping[str, Callable[..., float]] = {
    "multiply": lambda one, other: one * other,
    "add": lambda one, other: one + other,
    "subtract": lambda one, other: one - other,
    "divide": lambda one, other: one / other,
    "int_div": lambda one, other: one // other,
}
