"""Tables: one row for every key of another system, with what it is in ours, and what reads a configuration by them.

A row's value becomes an `Outcome`: keys of ours, or the reason why there are none. A key that no row knows is an error.
What the other system does where nothing is said is part of its table too: `default`.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal

from corral.recipe.errors import RecipeError
from corral.recipe.keys import KeyPath, did_you_mean

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
    """As it was written; an old spelling stays one."""
    value: Any
    where: str
    """`train.sh:12`. Empty: nobody wrote it, it is the other system's default."""
    added: bool = False
    """With Hydra's `+`: the other system's own configuration does not have it."""

    def __str__(self) -> str:
        """On one line, without secrets."""
        value = "***" if is_secret(self.key) and self.value else one_line(format_value(self.value))
        return f"{self.key}={value if len(value) <= LONGEST_SHOWN else value[: LONGEST_SHOWN - 3] + '...'}"


@dataclass(frozen=True)
class Outcome:
    status: Status
    ours: Mapping[KeyPath, Any] = field(default_factory=dict)
    note: str = ""


def mapped(ours: str | KeyPath, value: Any, note: str = "") -> Outcome:
    """The same thing under another name."""
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
    """One stands for a list of one."""
    return [text(item) for item in (value if isinstance(value, list) else [value])]


def integers(value: Any) -> list[int]:
    return [integer(item) for item in (value if isinstance(value, list) else [value])]


def anything(value: Any) -> Any:
    return value


# --- rows

Convert = Callable[["ForeignConfig", ForeignValue], Outcome]


@dataclass(frozen=True)
class KeyRow:
    key: str
    """`a.b`; `*` stands for any one name, and `**` at the end for all that is below."""
    kind: Kind
    convert: Convert
    default: Any = ABSENT

    def fits(self, key: str) -> bool:
        pattern, names = self.key.split("."), key.split(".")
        if pattern[-1] == "**":
            pattern = pattern[:-1]
            names = names[: len(pattern)] if len(names) > len(pattern) else [""]
        return len(pattern) == len(names) and all(
            part in ("*", name) for part, name in zip(pattern, names, strict=True)
        )


def same(key: str, ours: str, kind: Kind, default: Any = ABSENT) -> KeyRow:
    return KeyRow(key, kind, lambda _, given: mapped(ours, given.value), default)


def turned(key: str, kind: Kind, convert: Convert, default: Any = ABSENT) -> KeyRow:
    return KeyRow(key, kind, convert, default)


def needless(key: str, note: str) -> KeyRow:
    """Whatever its value, Corral does so anyway or decides it by itself."""
    return KeyRow(key, anything, lambda *_: built_in(note))


def idle(key: str, why: str) -> KeyRow:
    """Nothing reads it over there."""
    return KeyRow(key, anything, lambda *_: no_effect(why))


def only(key: str, kind: Kind, values: Iterable[Any], note: str, otherwise: str) -> KeyRow:
    """Corral has just these values of it; null counts as one of them."""
    allowed = (*values, None)
    return KeyRow(key, kind, lambda _, given: built_in(note) if given.value in allowed else unsupported(otherwise))


def lacking(key: str, why: str) -> KeyRow:
    """Unsupported, unless it is switched off: null, false, 0 or empty."""
    return KeyRow(key, anything, lambda _, given: unsupported(why) if given.value else built_in("off, as in Corral"))


@dataclass(frozen=True)
class KeyTable:
    title: str
    rows: tuple[KeyRow, ...]
    """In the order in which they are read. A key's row is the one with its very name, else the first that fits it."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spellings; `a.**` stands for all that is below."""

    def canonical(self, key: str) -> str:
        if key in self.aliases:
            return self.aliases[key]
        for old, new in self.aliases.items():
            if old.endswith(".**") and key.startswith(old[:-2]):
                return new[:-2] + key[len(old) - 2 :]
        return key

    def row(self, key: str) -> KeyRow | None:
        if key not in self._by_key:
            self._by_key[key] = next((row for row in self._patterns if row.fits(key)), None)
        return self._by_key[key]

    @cached_property
    def _by_key(self) -> dict[str, KeyRow | None]:
        """Those with a name of their own, and what was asked for before."""
        return {row.key: row for row in reversed(self.rows) if "*" not in row.key}

    @cached_property
    def _patterns(self) -> list[KeyRow]:
        return [row for row in self.rows if "*" in row.key]


# --- reading


@dataclass(frozen=True)
class KeyReport:
    """What became of a key: a line of the report."""

    given: ForeignValue
    outcome: Outcome


@dataclass(frozen=True)
class RecipeValue:
    """A key of ours and where its value is from."""

    value: Any
    given: ForeignValue
    outcome: Outcome


class ForeignConfig:
    """A configuration on its way through a table: what conversions ask for the values of other keys."""

    def __init__(self, table: KeyTable, given: Mapping[str, ForeignValue]) -> None:
        self.table = table
        self.problems: list[str] = []
        self.given: dict[str, ForeignValue] = {}
        self.strange: list[KeyReport] = []
        for one in given.values():
            self._add(table.canonical(one.key), one)

    def _add(self, key: str, one: ForeignValue) -> None:
        row = self.table.row(key)
        other = self.given.get(key)
        if row is None and one.added:
            why = f"not in the configuration of {self.table.title} itself: code of yours reads it"
            self.strange.append(KeyReport(one, unsupported(why)))
        elif row is None:
            near = did_you_mean(next(iter(get_close_matches(key, self._known(), n=1, cutoff=0.8)), None))
            self.problem(one, f"is not a key of {self.table.title} that Corral knows{near}")
        elif other is not None and other.value != one.value:
            self.problem(one, f"is the same key as {other} ({other.where}), with another value")
        else:
            try:
                value = None if one.value is None else row.kind(one.value)
            except (ValueError, OverflowError) as error:
                self.problem(one, f"should be {error}")
            else:
                self.given[key] = ForeignValue(one.key, value, one.where)

    def _known(self) -> list[str]:
        return [row.key for row in self.table.rows] + list(self.table.aliases)

    def problem(self, given: ForeignValue, what: str) -> None:
        self.problems.append(f"{given.where or self.table.title}: `{given}` {what}")

    def __getitem__(self, key: str) -> Any:
        """As written, else what the other system takes; None where it takes nothing."""
        if key in self.given:
            return self.given[key].value
        row = self.table.row(key)
        assert row is not None, key
        return None if row.default is ABSENT else row.default

    def __contains__(self, key: str) -> bool:
        """Whether it was written, with another value than null."""
        return key in self.given and self.given[key].value is not None

    def below(self, prefix: str) -> dict[str, Any]:
        """What was written below it, `a.b` for nested keys."""
        start = prefix + "."
        return {key[len(start) :]: one.value for key, one in self.given.items() if key.startswith(start)}

    def read(self) -> tuple[dict[KeyPath, RecipeValue], list[KeyReport]]:
        """Raises a RecipeError with all that is wrong."""
        outcomes = list(self._outcomes())
        entries = [*(KeyReport(one, outcome) for one, outcome in outcomes if one.where), *self.strange]
        settings: dict[KeyPath, RecipeValue] = {}
        for one, outcome in outcomes:
            for path, value in outcome.ours.items():
                before = settings.get(path)
                if before is None or (one.where and not before.given.where):
                    settings[path] = RecipeValue(value, one, outcome)
                elif one.where and before.value != value:
                    self.problem(one, f"and {before.given} both say what `{'.'.join(path)}` is, and differ")
        if self.problems:
            raise RecipeError(dict.fromkeys(self.problems))
        return settings, entries

    def _outcomes(self) -> Iterator[tuple[ForeignValue, Outcome]]:
        written = defaultdict[int, list[ForeignValue]](list)
        for key, one in self.given.items():
            written[id(self.table.row(key))].append(one)
        for row in self.table.rows:
            unwritten = [] if row.default is ABSENT else [ForeignValue(row.key, row.default, "")]
            for one in written[id(row)] or unwritten:
                try:
                    yield one, row.convert(self, one)
                except (ValueError, ArithmeticError) as error:
                    self.problem(one, str(error))
                except TypeError:
                    nulls = [other.key for other in self.given.values() if other.value is None]
                    if not nulls:
                        raise
                    self.problem(one, f"cannot be worked out with null for {' or '.join(nulls)}")


def is_secret(key: str) -> bool:
    """By its name: `tracker_kwargs.api_key`, `system_envs.HF_TOKEN`; not `prompt_key` or `max_tokens`."""
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
