"""Kinds of values that a key of another system may have, and values as text. None is of every kind."""

import math
import re
from collections.abc import Callable
from typing import Any

SECRET = re.compile(
    r"(?:.*\.)?(?:\w*(?:api_key|apikey|password|passwd|secret|auth_token|access_token)|token|\w*(?:KEY|TOKEN|SECRET|PASSWORD))"
)
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
