"""Tables of another system's keys, and configurations on their way through them. Their files: `table_file.py`."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher, get_close_matches
from functools import cached_property
from typing import Any

from corral.migrate.outcome import ABSENT, ForeignValue, Outcome, built_in, no_effect, unsupported
from corral.migrate.value_kinds import Kind, format_value
from corral.recipe.keys import KeyPath, did_you_mean

BRACES = re.compile(r"\{([^{}]*)\}")
FEATURES = {
    r"(^|[._])qat([._]|$)": "Corral has no quantization-aware training",
    r"fp8|float8|fp4|quantiz": "Corral computes with 16 bits or more; beside adapters see `model.quantization`",
    r"rout(er|ing)_replay": "experts are chosen again in training",
    r"(^|[._])pipeline_(model_)?parallel(_size)?$|(^|[._])pp_size$": "see `train.parallel`",
    r"^(rollout|actor_(infer|rollout_ref.rollout))\..*(tensor_(model_)?parallel_size|tp_size)$": "see `rollout.engine`",
}
"""Keys of any system that change what is computed: no row for a whole section says of these that they are built in."""
OFF = (None, False, 0, 1, "", "none", "null", "disabled", "false", "auto")
SWITCHES = ("enable", "enabled", "mode")

Convert = Callable[["ForeignConfig", ForeignValue], Outcome]


@dataclass(frozen=True)
class KeyRow:
    key: str
    """`a.b`; `*` stands for any one name, and `**` at the end for all that is below."""
    kind: Kind
    convert: Convert
    default: Any = ABSENT


def fits(pattern: str, key: str) -> bool:
    parts, names = pattern.split("."), key.split(".")
    if parts[-1] == "**":
        parts = parts[:-1]
        names = names[: len(parts)] if len(names) > len(parts) else [""]
    return len(parts) == len(names) and all(part in ("*", name) for part, name in zip(parts, names, strict=True))


@dataclass(frozen=True)
class KeyTable:
    title: str
    rows: tuple[KeyRow, ...]
    """Rows in the order in which they are read. The row of a key is the one with its name, else the first that fits."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spellings; `a.**` stands for all that is below."""
    document: Mapping[str, Any] = field(default_factory=dict)
    """The file, with what it has of the table that it is based on."""
    is_whole: Callable[["ForeignConfig"], bool] = lambda config: False
    """Whether a configuration has the file's own defaults, and not those of the rows, which are of an example that the
    pieces in a guide are from."""

    def other_kind(self, written: Iterable[ForeignValue]) -> str | None:
        """A line about the first key that belongs to another kind of run."""
        for kind, patterns in self.document["kinds"].items():
            for pattern in expand_keys(patterns):
                key, _, value = pattern.partition("=")
                for one in written:
                    if fits(key, self.canonical(one.key)) and (
                        format_value(one.value) == value if value else one.value
                    ):
                        return f"{one.where}: `{one}` is of {kind}, which is not migrated"
        return None

    def lacks(self, written: Iterable[ForeignValue]) -> str | None:
        """A line about a configuration without any of the keys that each training has."""
        if not (needs := self.document.get("needs")):
            return None
        keys = [self.canonical(one.key) for one in written]
        needed = next(patterns for key, patterns in needs.items() if key in (*keys, "else"))
        if any(fits(pattern, key) for pattern in expand_keys(needed) for key in keys):
            return None
        names = " or ".join(f"`{pattern.removesuffix('.**')}`" for pattern in expand_keys(needed))
        return f"it is rollouts or a part of a configuration, which is not migrated: it has no {names}"

    def canonical(self, key: str) -> str:
        if key in self.aliases:
            return self.aliases[key]
        for old, new in self.aliases.items():
            if old.endswith(".**") and key.startswith(old[:-2]):
                return new[:-2] + key[len(old) - 2 :]
        return key

    def row(self, key: str) -> KeyRow | None:
        if key not in self._by_key:
            self._by_key[key] = next((row for row in self._patterns if fits(row.key, key)), None)
        return self._by_key[key]

    @cached_property
    def _by_key(self) -> dict[str, KeyRow | None]:
        """Rows with a name of their own, and what was looked up before."""
        return {row.key: row for row in reversed(self.rows) if "*" not in row.key}

    @cached_property
    def _patterns(self) -> list[KeyRow]:
        return [row for row in self.rows if "*" in row.key]


def expand_keys(text: str) -> Iterator[str]:
    """`a.{b,c} d` is a.b, a.c and d."""
    for word in re.sub(r",\s+", ",", text).split():
        if match := BRACES.search(word):
            for name in match[1].split(","):
                yield from expand_keys(word[: match.start()] + name + word[match.end() :])
        else:
            yield word


# --- reading


def nearest_name(key: str, known: Iterable[str]) -> str | None:
    """The key that was probably meant: the same name in another section, or one whose words are all spelled alike.
    (`local_rank` as a whole is like `lora_rank`, and something else.)"""
    names = [name for name in known if "*" not in name]
    last = key.rpartition(".")[2]
    if elsewhere := [name for name in names if name.rpartition(".")[2] == last]:
        return max(elsewhere, key=lambda name: SequenceMatcher(None, key, name).ratio())

    def likeness(name: str) -> float:
        words, others = re.split("[._]", key), re.split("[._]", name)
        pairs = zip(words, others, strict=True) if len(words) == len(others) else [(key, name)]
        least = min(SequenceMatcher(None, *pair).ratio() for pair in pairs)
        return least if len(words) == len(others) or least > 0.9 else 0.0

    best = max(get_close_matches(key, names, n=20, cutoff=0.75), key=likeness, default="")
    return best if best and likeness(best) >= 0.75 else None


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
        self.table, self.constants = table, table.document["constants"]
        self.problems: list[str] = []
        self.given: dict[str, ForeignValue] = {}
        self.strange: list[KeyReport] = []
        """Keys that are in no row, and other spellings of those that are."""
        for one in given.values():
            self._add(table.canonical(one.key), one)

    def _add(self, key: str, one: ForeignValue) -> None:
        row = self.table.row(key)
        other = self.given.get(key)
        if row is None and one.added:
            why = f"not in the configuration of {self.table.title} itself: code of yours reads it"
            self.strange.append(KeyReport(one, unsupported(why)))
        elif row is None and one.referenced and not any(name.startswith(key.split(".")[0]) for name in self._known()):
            self.strange.append(KeyReport(one, no_effect("other keys refer to it, and nothing else reads it")))
        elif row is None:
            near = did_you_mean(nearest_name(key, self._known()))
            self.problem(one, f"is not a key of {self.table.title} that Corral knows{near}")
        elif other is not None and None not in (other.value, one.value) and other.value != one.value:
            self.problem(one, f"is the same key as {other} ({other.where}), with another value")
        else:
            try:
                value = None if one.value is None else row.kind(one.value)
            except (ValueError, OverflowError) as error:
                self.problem(one, f"should be {error}")
            else:
                read = ForeignValue(one.key, value, one.where)
                if other is not None:
                    read, same = (other, read) if value is None else (read, other)
                    self.strange.append(KeyReport(same, built_in(f"another spelling of `{read.key}`")))
                self.given[key] = read

    def _known(self) -> list[str]:
        return [row.key for row in self.table.rows] + list(self.table.aliases)

    def problem(self, given: ForeignValue, what: str) -> None:
        self.problems.append(f"{given.where or self.table.title}: `{given}` {what}")

    def __getitem__(self, key: str) -> Any:
        """The value as written, else what the other system takes; None where it takes nothing."""
        return self.given[key].value if key in self.given else self.default(key)

    def value(self, key: str) -> Any:
        """The same, with the default also where null is written."""
        return self.given[key].value if key in self else self.default(key)

    def default(self, key: str) -> Any:
        own_defaults = self.table.document["own defaults"]
        if key in own_defaults and self.table.is_whole(self):
            return own_defaults[key]
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

    def ours(self, key: str) -> list[tuple[KeyPath, Any]]:
        """What a key sets in the recipe, as written or by its default; nothing where its row refuses the value."""
        row = self.table.row(key)
        assert row is not None, key
        given = self.given.get(key, None if row.default is ABSENT else ForeignValue(key, row.default, ""))
        try:
            return [] if given is None else list(row.convert(self, given).ours.items())
        except (ValueError, ArithmeticError, TypeError):
            return []

    def read(self) -> tuple[dict[KeyPath, RecipeValue], list[KeyReport]]:
        """The values of the recipe, and what became of each key; `problems` are why there is none."""
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
        return settings, entries

    def _feature(self, one: ForeignValue) -> Outcome | None:
        """What becomes of a key of FEATURES that is on; None of any other."""
        key = self.table.canonical(one.key)
        section = key.rpartition(".")[0]
        switches = [self.given[name].value for name in (f"{section}.{one}" for one in SWITCHES) if name in self.given]
        if key.endswith("_target_") or any(value is not True and value in OFF for value in (one.value, *switches)):
            return None
        return next((unsupported(why) for name, why in FEATURES.items() if re.search(name, key)), None)

    def _outcomes(self) -> Iterator[tuple[ForeignValue, Outcome]]:
        written = defaultdict[int, list[ForeignValue]](list)
        for key, one in self.given.items():
            written[id(self.table.row(key))].append(one)
        for row in self.table.rows:
            unwritten = [] if row.default is ABSENT else [ForeignValue(row.key, self.default(row.key), "")]
            for one in written[id(row)] or unwritten:
                try:
                    outcome = row.convert(self, one)
                    is_general = "*" in row.key and outcome.status == "built in"
                    yield one, self._feature(one) or outcome if is_general else outcome
                except (ValueError, ArithmeticError) as error:
                    self.problem(one, str(error))
                except TypeError:
                    nulls = [other.key for other in self.given.values() if other.value is None]
                    if not nulls:
                        raise
                    self.problem(one, f"cannot be worked out with null for {' or '.join(nulls)}")
