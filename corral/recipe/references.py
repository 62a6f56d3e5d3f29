"""`${a.b}`: the value of another key. Alone it keeps its type, inside a text it is text; `$${` is a plain `${`."""

import copy
import json
import re
from typing import Any, NoReturn

from corral.recipe.document import Document
from corral.recipe.keys import KeyPath, did_you_mean, dotted, expand, find_key, nearest_key

MAX_FOLLOWED, MAX_CHARACTERS = 10_000, 1 << 20
"""References may refer to others, and each of them twice to the one before it."""
REFERENCE = re.compile(r"\$\$\{|\$\{([^{}]*)\}")


def resolve_references(document: Document) -> None:
    """Put every reference's value in its place. Those that have none are reported and taken out."""
    document.values = _Resolver(document).section((), document.values)


def escape_references(value: Any) -> Any:
    """The inverse, for writing: what looks like a reference but is text."""
    if isinstance(value, dict):
        return {key: escape_references(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escape_references(item) for item in value]
    return re.sub(r"\$+\{", lambda match: "$" + match[0], value) if isinstance(value, str) else value


class _Unresolved(Exception):
    """Already reported."""


class _Resolver:
    def __init__(self, document: Document) -> None:
        self.document = document
        self.open: list[KeyPath] = []
        """Keys whose references are being followed right now, outermost first."""
        self.num_followed = 0

    def section(self, path: KeyPath, values: dict[str, Any]) -> dict[str, Any]:
        resolved = {}
        for name, value in values.items():
            below = (*path, name)
            try:
                resolved[name] = self.section(below, value) if isinstance(value, dict) else self.value(below, value)
            except _Unresolved:
                self.document.broken.add(below)
        return resolved

    def value(self, path: KeyPath, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: self.value((*path, name), item) for name, item in value.items()}
        if isinstance(value, list):
            return [self.value(path, item) for item in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        if path in self.open:
            self.cycle(path)
        self.open.append(path)
        try:
            return self.text(path, value)
        finally:
            self.open.pop()

    def text(self, path: KeyPath, text: str) -> Any:
        alone = REFERENCE.fullmatch(text)
        if alone and alone[1] is not None:
            return copy.deepcopy(self.look_up(path, alone[1]))
        replaced = REFERENCE.sub(lambda match: "${" if match[1] is None else self.as_text(path, match[1]), text)
        if len(replaced) > MAX_CHARACTERS:
            self.fail(path, f"with its references it has more than {MAX_CHARACTERS} characters")
        return replaced

    def as_text(self, path: KeyPath, name: str) -> str:
        value = self.look_up(path, name)
        if value is None or isinstance(value, dict | list):
            self.fail(path, f"`${{{name}}}` cannot be put into a text: its value is {json.dumps(value)}")
        return value if isinstance(value, str) else json.dumps(value)

    def look_up(self, path: KeyPath, name: str) -> Any:
        self.num_followed += 1
        if self.num_followed > MAX_FOLLOWED:
            self.fail(path, f"`${{{name}}}`: the recipe's references lead to more than {MAX_FOLLOWED} others")
        target = expand((), name.strip())
        found: Any = self.document.values
        for end, part in enumerate(target):
            if isinstance(found, str):  # a section that is itself a reference
                found = self.value(target[:end], found)
            if not isinstance(found, dict) or part not in found:
                return self.default(path, name, target)
            found = found[part]
        return self.value(target, found)

    def default(self, path: KeyPath, name: str, target: KeyPath) -> Any:
        """Of a key that the recipe leaves out."""
        key = find_key(target)
        if key is None:
            hint = did_you_mean(nearest_key(target))
            self.fail(
                path, f"`${{{name}}}` refers to a key that does not exist{hint or '; write `$${` for a plain `${`'}"
            )
        if key.required:
            self.fail(path, f"`${{{name}}}` refers to a key that has no value")
        return key.default

    def fail(self, path: KeyPath, message: str) -> NoReturn:
        self.document.report(self.document.where(path), message)
        raise _Unresolved

    def cycle(self, path: KeyPath) -> NoReturn:
        """Reported once, at the key of the circle that comes first in the file."""
        circle = self.open[self.open.index(path) :]
        first = min(circle, key=lambda step: (self.document.where(step), step))
        turn = circle.index(first)
        steps = [*circle[turn:], *circle[:turn], first]
        self.fail(first, f"values refer to each other in a circle: {' -> '.join(map(dotted, steps))}")
