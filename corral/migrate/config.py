"""A configuration of another system as it was written: YAML files with Hydra's `defaults`, and changes to it from a
command line (`a.b=c`, `+a.b=c`, `~a.b`). Nothing in it is ever evaluated.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from corral.migrate.interpolation import ReferenceResolver
from corral.migrate.outcome import ForeignValue, format_value
from corral.migrate.values import read_value
from corral.recipe.document import compose, plain, read_text
from corral.recipe.errors import RecipeError
from corral.recipe.keys import KeyPath

OVERRIDE = re.compile(r"(?P<sign>\+{0,2}|~)(?P<key>[\w./@,-]+)(?:=(?P<value>.*))?", re.DOTALL)
DEFAULT = re.compile(r"[\w./-]{1,200}")
PACKAGE = re.compile(r"^#\s*@package\s+([\w.]+)", re.MULTILINE)
YAML_BOOLEANS = {"yes": True, "on": True, "no": False, "off": False}
"""What OmegaConf's YAML has for true and false, besides these words."""
MAX_FILES = 100
MAX_DEPTH = 30


class RawConfig:
    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self.variables = dict(variables or {})
        """Of the environment, for `${oc.env:NAME}`; none but these is read."""
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
        """References resolved. Raises a RecipeError with all problems."""
        references = ReferenceResolver(self)
        given: dict[str, ForeignValue] = {}
        for path, value in leaves((), self.values):
            try:
                resolved = references.resolve(path, value)
            except RecipeError as error:
                self.problems += error.problems
                continue
            for below, leaf in leaves(path, resolved):
                key = ".".join(below)
                given[key] = ForeignValue(key, leaf, self.where(below) or ".".join(path), key in self.added)
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


def add_file(config: RawConfig, path: Path, package: KeyPath = (), around: tuple[Path, ...] = ()) -> None:
    """A file below `package`, and the files that its `defaults` name, under it or over it as `_self_` says."""
    config.num_files += 1
    if path.resolve() in [other.resolve() for other in around]:
        raise RecipeError(f"{path}: `defaults` of files name each other in a circle")
    if config.num_files > MAX_FILES:
        raise RecipeError(f"{path}: `defaults` name more than {MAX_FILES} files")
    text = read_text(path)
    node = compose(text, str(path))
    if node is None:
        return
    if not isinstance(node, yaml.MappingNode):
        raise RecipeError(f"{path}:{node.start_mark.line + 1}: should be a mapping of keys to values")
    if around and (declared := PACKAGE.search(text)):
        package = package_of(declared[1], package, package)
    items = defaults_of(node, path)
    for item in items:
        if item == "_self_":
            add_node(config, package, node, str(path))
        else:
            add_default(config, path, item, package, (*around, path))


def defaults_of(node: yaml.MappingNode, path: Path) -> list[Any]:
    """With `_self_` in its place, which is the end unless it is said, and with overrides of choices made."""
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
            config.set(below, with_booleans(plain(value_node), value_node), where)


def with_booleans(value: Any, node: yaml.Node) -> Any:
    is_plain = isinstance(node, yaml.ScalarNode) and node.style is None and isinstance(value, str)
    return YAML_BOOLEANS.get(value.lower(), value) if is_plain else value


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
