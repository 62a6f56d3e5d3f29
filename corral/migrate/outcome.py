"""A key of another system with its value, and what becomes of it in a recipe of Corral."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from corral.recipe.keys import KeyPath

Status = Literal["mapped", "converted", "built in", "no effect", "unsupported"]
SECRET = re.compile(
    r"(?:.*\.)?(?:\w*(?:api_key|apikey|password|passwd|secret|auth_token|access_token)|token|\w*(?:KEY|TOKEN|SECRET|PASSWORD))"
)
LONGEST_SHOWN = 80
"""Characters of a value in a line for users."""
ABSENT: Any = object()
"""The default of a key without one."""


@dataclass(frozen=True)
class ForeignValue:
    key: str
    """The key as it was written; an old spelling stays one."""
    value: Any
    where: str
    """`train.sh:12`. Empty: nobody wrote it, it is the other system's default."""
    added: bool = False
    """Whether it was written with Hydra's `+`: the other system's own configuration does not have it."""

    def __str__(self) -> str:
        """The override on one line, without secrets."""
        value = "***" if is_secret(self.key) and self.value else one_line(format_value(self.value))
        return f"{self.key}={value if len(value) <= LONGEST_SHOWN else value[: LONGEST_SHOWN - 3] + '...'}"


@dataclass(frozen=True)
class Outcome:
    status: Status
    ours: Mapping[KeyPath, Any] = field(default_factory=dict)
    note: str = ""


def mapped(ours: str | KeyPath, value: Any, note: str = "") -> Outcome:
    """An outcome that is the same thing under another name."""
    return Outcome("mapped", {as_path(ours): value}, note)


def converted(ours: Mapping[Any, Any], note: str) -> Outcome:
    """Another number or other words for the same thing; the note has both. Keys are `a.b` or tuples."""
    return Outcome("converted", {as_path(key): value for key, value in ours.items()}, note)


def built_in(note: str) -> Outcome:
    """What Corral does anyway, or finds out by itself."""
    return Outcome("built in", {}, note)


def no_effect(why: str) -> Outcome:
    """Nothing reads it over there either."""
    return Outcome("no effect", {}, why)


def unsupported(why: str) -> Outcome:
    return Outcome("unsupported", {}, why)


def as_path(key: str | KeyPath) -> KeyPath:
    return tuple(key.split(".")) if isinstance(key, str) else key


def run_name(config: object, given: ForeignValue) -> Outcome:
    """A conversion that all systems have: a run's name becomes that of a folder."""
    name = re.sub(r"[^\w.+=,-]+", "-", given.value or "").strip("-.+=,")
    if not name:
        raise ValueError("should name the run")
    return mapped("name", name) if name == given.value else converted({"name": name}, f"`{given.value}` as a folder")


# --- kinds of values; None passes through all of them

Kind = Callable[[Any], Any]
"""Raises a ValueError that says what it should be."""


def integer(value: Any) -> int:
    if not is_finite(value) or value != int(value):
        raise ValueError("a whole number")
    return int(value)


def number(value: Any) -> float:
    if not is_finite(value):
        raise ValueError("a number")
    return float(value) if isinstance(value, float) else value


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def boolean(value: Any) -> bool:
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def text(value: Any) -> str:
    if isinstance(value, dict | list):
        raise ValueError("text")
    return value if isinstance(value, str) else format_value(value)


def texts(value: Any) -> list[str]:
    """A list of texts, for which a single one may stand."""
    return [text(item) for item in (value if isinstance(value, list) else [value])]


def integers(value: Any) -> list[int]:
    return [integer(item) for item in (value if isinstance(value, list) else [value])]


def anything(value: Any) -> Any:
    return value


# --- values as text


def one_or_all(items: list[str]) -> str | list[str]:
    """A list of one item as that item, which a recipe may have for it."""
    return items[0] if len(items) == 1 else items


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def is_secret(key: str) -> bool:
    """Whether a key holds a secret by its name: `tracker_kwargs.api_key`, `envs.HF_TOKEN`; not `prompt_key`."""
    return SECRET.fullmatch(key) is not None


def one_line(text: str) -> str:
    """What is not printed is a question mark."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def format_value(value: Any) -> str:
    """A value as in an override."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{', '.join(map(format_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {format_value(item)}" for name, item in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)
