"""OmegaConf's references: `${a.b}`, `${.a}` beside a key, and the few resolvers that need no code to be run."""

import copy
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from corral.migrate.outcome import ABSENT, is_secret
from corral.migrate.values import read_value
from corral.recipe.errors import RecipeError
from corral.recipe.keys import KeyPath

if TYPE_CHECKING:
    from corral.migrate.config import RawConfig

REFERENCE = re.compile(r"\$\{([^${}]*)\}")
MAX_DEPTH = 60
"""Values that refer to values that refer to values."""
MAX_SIZE = 200_000
"""Values and characters that references put in: more are a bomb, not a configuration."""
ARITHMETIC: Mapping[str, Callable[..., float]] = {
    "multiply": lambda one, other: one * other,
    "add": lambda one, other: one + other,
    "subtract": lambda one, other: one - other,
    "divide": lambda one, other: one / other,
    "int_div": lambda one, other: one // other,
}


class ReferenceResolver:
    def __init__(self, config: "RawConfig") -> None:
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
        if len(self.open) > MAX_DEPTH:
            raise self.problem(path, "refers to values that refer to values, too deeply")
        self.open.append(path)
        try:
            return self._text(path, value)
        finally:
            self.open.pop()

    def _text(self, path: KeyPath, value: str) -> Any:
        """Innermost references first, so that `${a.${b}}` works."""
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
        if self.put_in > MAX_SIZE:
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
            return self._value(path, first, found) if found is not ABSENT else self._default(arguments)
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

    def _default(self, arguments: list[str]) -> Any:
        return read_value(arguments[1]) if len(arguments) > 1 else None

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
    if isinstance(value, dict):
        return 1 + sum(map(size_of, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(size_of, value))
    return 1 + len(value) // 10 if isinstance(value, str) else 1
