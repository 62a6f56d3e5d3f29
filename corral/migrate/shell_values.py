"""The variables of a shell script, and what words become when their values are put in."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from corral.migrate.shell_sums import changed_names, worked_out
from corral.migrate.shell_words import Array, Lexer, Part, Sum, Text, Unknown, Variable, Word
from corral.recipe.errors import RecipeError

LONGEST = 100_000
"""Characters of a value: variables that double each other are no script."""
MOST = 5_000_000
"""Characters of all values together, with EXTRA for each: arrays that double each other are none either."""
EXTRA = 50
MOST_DOUBTS = 20
"""Of one value: who has read these needs no more."""
PRINTING = re.compile(r"\s*(?P<program>pwd|date|basename|dirname)(?:\s+(?P<rest>[^\s;|&<>()`]+|\+[^;|&<>()`]+))?\s*")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SPACES = " \t\n"
WILD = re.compile(r"[*?\[\\]")


@dataclass(frozen=True)
class Value:
    """A word as the shell would pass it."""

    text: str
    line: int = 0
    unknown: str | None = None
    """The command whose output is in it, or what else only a shell that runs would know."""
    recipe_warnings: tuple[str, ...] = ()


class Piece(NamedTuple):
    """Of a word."""

    value: Value
    splits: bool = False
    """At spaces: it comes from a variable outside quotes."""
    starts: bool = False
    """Another word: the next element of an array."""


class Scope:
    """What each name stands for at the line that is being read."""

    def __init__(self, source: str, values: dict[str, list[Value]], fixed: frozenset[str] = frozenset()) -> None:
        self.source, self.values, self.fixed = source, values, fixed
        """`fixed`: names whose values the user gave, whatever the script says."""
        self.arguments: list[Value] | None = None
        """Of `set -- a b`. None: they are whatever the script is called with."""
        self.num_shifted = 0
        self.caller = "the script"
        """Whose arguments `$1` and so on are."""
        self.in_branch = False
        """Whether what is read may not be run."""
        self.num_characters = 0
        self._before: list[dict[str, list[Value] | None]] = []
        """What the names that a subshell sets stood for before it, for each subshell that is open."""

    # --- variables

    def assign(self, name: str, values: list[Value], line: int, appends: bool = False) -> None:
        if self.in_branch:
            doubt = f"{self.source}:{line}: ${name} is set inside a branch or a loop; its last value is taken"
            values = [doubted(value, [doubt]) for value in values]
        if appends:
            self._extend(name, values)
        else:
            self.set(name, values)

    def set(self, name: str, values: list[Value] | None) -> None:
        if name in self.fixed:
            return
        if self._before:
            self._before[-1].setdefault(name, self.values.get(name))
        if values is None:
            self.values.pop(name, None)
        else:
            self.values[name] = values

    def _extend(self, name: str, values: list[Value]) -> None:
        """An array, in place where nobody else has it: a thousand of these must not copy it a thousand times."""
        if name in self.values and name not in self.fixed and (not self._before or name in self._before[-1]):
            self.values[name] += values
        else:
            self.set(name, [*self.values.get(name, []), *values])

    def forget(self, name: str, why: str) -> None:
        """It has another value from here on, which only a shell that runs would know."""
        self.set(name, [Value(f"${name}", unknown=why)])

    def enter_subshell(self) -> None:
        self._before.append({})

    def leave_subshell(self) -> None:
        for name, values in self._before.pop().items():
            if values is None:
                self.values.pop(name, None)
            else:
                self.values[name] = values

    # --- words

    def expand(self, words: Iterable[Word]) -> list[Value]:
        """One may become none or several: `$ARGS`, `"${ARGS[@]}"`. The doubts of none go to its neighbour."""
        found: list[Value] = []
        lost: list[str] = []
        for word in words:
            *others, last = self._fields(word)
            for pieces in others:
                value = self.join(pieces, word.line)
                found.append(doubted(value, lost) if lost else value)
                lost = []
            lost += [doubt for value in last for doubt in value.recipe_warnings]
        if found and lost:
            found[-1] = doubted(found[-1], lost)
        return found

    def _fields(self, word: Word) -> list[list[Value]]:
        """The words that one becomes, as pieces, and last the pieces that become none."""
        fields: list[list[Value]] = [[]]
        there = False
        for value, splits, starts in self._counted(word):
            texts = self._split(value.text) if splits and value.unknown is None else [value.text]
            for number, text in enumerate(texts):
                if there and (number or starts):
                    fields.append([])
                    there = False
                fields[-1].append(value if text == value.text else replace(value, text=text))
                there = there or not splits or text != ""
        return [*fields, []] if there else fields

    def _split(self, text: str) -> list[str]:
        separators = self._separators()
        return re.split(f"[{re.escape(separators)}]+", text) if separators else [text]

    def _separators(self) -> str:
        values = self.values.get("IFS")
        return values[0].text[:20] if values and values[0].unknown is None else SPACES

    def joined(self, word: Word) -> Value:
        """All of it as one, as behind `NAME=`."""
        values: list[Value] = []
        for piece in self._counted(word):
            values += [Value(" "), piece.value] if piece.starts else [piece.value]
        return self.join(values, word.line)

    def _counted(self, word: Word) -> Iterator[Piece]:
        for piece in self._pieces(word.parts, word.line):
            self._count(len(piece.value.text) + EXTRA, word.line)
            yield piece

    def _count(self, num_characters: int, line: int) -> None:
        self.num_characters += num_characters
        if self.num_characters > MOST:
            raise RecipeError(f"{self.source}:{line}: all values together have more than {MOST} characters")

    def join(self, values: Sequence[Value], line: int) -> Value:
        if sum(len(value.text) for value in values) > LONGEST:
            raise RecipeError(f"{self.source}:{line}: a value has more than {LONGEST} characters")
        return join(values, line)

    # --- what is put in

    def _pieces(self, parts: Iterable[Part], line: int, in_default: bool = False) -> Iterator[Piece]:
        for part in parts:
            if isinstance(part, Text):
                yield Piece(Value(part.text), in_default and not part.quoted)
            elif isinstance(part, Unknown):
                yield Piece(self._printed(part, line))
            elif isinstance(part, Sum):
                yield Piece(self._sum(part))
            elif isinstance(part, Array):
                yield Piece(Value("(...)", unknown="(...)"))
            else:
                yield from self._variable(part, line)

    def _printed(self, part: Unknown, line: int) -> Value:
        """What a command would print, where that is only a text taken apart, or the day."""
        match = PRINTING.fullmatch(part.what)
        if match is None:
            return Value(part.written, unknown=part.what)
        if match["program"] == "pwd":
            return Value(".")
        if match["program"] == "date":
            return Value("", recipe_warnings=(f"{self.source}:{line}: what `date` prints is left out",))
        [word] = list(Lexer(match["rest"], self.source, line).tokens())[:1]
        value = self.joined(word) if isinstance(word, Word) else Value(part.written, unknown=part.what)
        folder, _, name = value.text.rstrip("/").rpartition("/")
        return replace(value, text=name if match["program"] == "basename" else folder or ".")

    def _sum(self, part: Sum) -> Value:
        inner = self.joined(part.expression)
        used: list[Value] = [inner]

        def lookup(name: str) -> str | None:
            values = self.values.get(name)
            if not values:
                used.append(Value("", recipe_warnings=(self._unset(name, part.expression.line),)))
                return "0"
            used.append(values[0])
            return values[0].text if values[0].unknown is None else None

        result = None if inner.unknown is not None else worked_out(inner.text, lookup)
        if result is not None:
            return replace(join(used, inner.line), text=str(result))
        written = f"$(({inner.text}))"
        for name in changed_names(inner.text):
            self.forget(name, written)
        return Value(written, unknown=next((one.unknown for one in used if one.unknown is not None), written))

    def _variable(self, part: Variable, line: int) -> Iterator[Piece]:
        values, operator = self._stored(part) or [], part.operator
        self._count(len(values), line)  # all are looked at, also where none is put in
        unknown = next((value.unknown for value in values if value.unknown is not None), None)
        if operator == "length":
            yield Piece(self._length(part, values, unknown, line))
        elif operator[-1:] in ("-", "=", "+") and self._takes_argument(operator, values, unknown):
            yield from self._argument(part, unknown, line)
        elif operator[-1:] == "+":
            yield from [Piece(Value(""))] if part.quoted and part.index is None else []
        elif not values:
            yield from self._nothing(part, line)
        else:
            yield from self._all(part, self._trimmed(part, values) if operator[:1] in ("#", "%") else values, line)

    def _takes_argument(self, operator: str, values: Sequence[Value], unknown: str | None) -> bool:
        """Whether `${A:-x}` or `${A:+x}` is `x`. With `:`, what is empty counts as not set."""
        is_set = bool(values) and (operator[0] != ":" or unknown is not None or any(value.text for value in values))
        return is_set == (operator[-1] == "+")

    def _argument(self, part: Variable, unknown: str | None, line: int) -> Iterator[Piece]:
        assert part.argument is not None
        if unknown is not None:
            yield Piece(Value(part.written, unknown=unknown))
            return
        if part.operator[-1] == "=":
            self.assign(part.name, [self.joined(part.argument)], line)
        yield from self._pieces(part.argument.parts, line, in_default=True)

    def _all(self, part: Variable, values: Sequence[Value], line: int) -> Iterator[Piece]:
        if part.quoted and part.index == "*":
            between = Value(self._separators()[:1])
            yield Piece(self.join([one for value in values for one in (between, value)][1:], line))
            return
        for number, value in enumerate(values):
            yield Piece(value, splits=not part.quoted, starts=number > 0)

    def _stored(self, part: Variable) -> list[Value] | None:
        """None or nothing: it is not set."""
        arguments = self.arguments or []
        if part.name in ("@", "*"):
            skipped = int(part.argument.plain or 0) if part.operator == ":" and part.argument else 1
            return arguments[self.num_shifted + max(skipped - 1, 0) :]
        if part.name == "#":
            return None if self.arguments is None else [Value(str(max(len(arguments) - self.num_shifted, 0)))]
        if part.name.isdigit() and self.arguments is not None:
            place = int(part.name) + self.num_shifted
            return arguments[place - 1 : place]
        name = str(int(part.name) + self.num_shifted) if part.name.isdigit() else part.name
        values = self.values.get(name)
        if values is None or part.index in ("@", "*"):
            return values
        place = int(part.index or 0)
        unknown = next(
            (value.unknown for value in (values if place < 0 else values[: place + 1]) if value.unknown is not None),
            None,
        )
        if place and unknown is not None:
            return [Value(part.written, unknown=unknown)]
        return [values[place]] if -len(values) <= place < len(values) else None

    def _nothing(self, part: Variable, line: int) -> Iterator[Piece]:
        """What is not set is empty, and no word where it is all of an array."""
        if part.name in "@*":
            return
        is_known = part.name in self.values or (self.arguments is not None and not NAME.fullmatch(part.name))
        recipe_warnings = () if is_known else (self._unset(part.name, line),)
        yield Piece(Value("", recipe_warnings=recipe_warnings), splits=not part.quoted or part.index == "@")

    def _unset(self, name: str, line: int) -> str:
        where = f"{self.source}:{line}: ${name} is"
        if name == "#":
            return f"{where} how many arguments {self.caller} gets, which is not known here"
        if name.isdigit():
            number = int(name) + self.num_shifted
            return f"{where} an argument of {self.caller}; give it with --define {number}=VALUE"
        return f"{where} not set in the script, so it is empty"

    def _length(self, part: Variable, values: list[Value], unknown: str | None, line: int) -> Value:
        if unknown is not None:
            return Value(part.written, unknown=unknown)
        length = len(values) if part.index in ("@", "*") else sum(len(value.text) for value in values)
        nothing = [] if values else [piece.value for piece in self._nothing(part, line)]
        return replace(join([*values, *nothing], line), text=str(length))

    def _trimmed(self, part: Variable, values: Sequence[Value]) -> list[Value]:
        assert part.argument is not None
        pieces = list(self._pieces(part.argument.parts, part.argument.line, in_default=True))
        pattern, recipe_warnings = (
            simple_pattern(pieces),
            [doubt for piece in pieces for doubt in piece.value.recipe_warnings],
        )
        trimmed = []
        for value in values:
            if pattern is None or value.unknown is not None:
                trimmed.append(Value(part.written, unknown=value.unknown or part.written))
            else:
                value = replace(value, text=without(value.text, part.operator, *pattern))
                trimmed.append(doubted(value, recipe_warnings) if recipe_warnings else value)
        return trimmed


def simple_pattern(pieces: Sequence[Piece]) -> tuple[str, bool, bool] | None:
    """A text, and whether a `*` stands before or behind it. None: it is more than that."""
    shape = "".join(piece.value.text if piece.splits else WILD.sub("x", piece.value.text) for piece in pieces)
    first, last = shape[:1] == "*", len(shape) > 1 and shape[-1] == "*"
    plain = slice(int(first), len(shape) - last)
    if WILD.search(shape[plain]) or (first and last) or any(piece.value.unknown is not None for piece in pieces):
        return None
    return "".join(piece.value.text for piece in pieces)[plain], first, last


def without(text: str, operator: str, wanted: str, first: bool, last: bool) -> str:
    """`text` less what fits at its start (#) or end (%). `first`, `last`: anything may stand there."""
    longest = len(operator) == 2
    if operator[0] == "#":
        if first:
            place = text.rfind(wanted) if longest else text.find(wanted)
            return text if place < 0 else text[place + len(wanted) :]
        return "" if text.startswith(wanted) and last and longest else text.removeprefix(wanted)
    if last:
        place = text.find(wanted) if longest else text.rfind(wanted)
        return text if place < 0 else text[:place]
    return "" if text.endswith(wanted) and first and longest else text.removesuffix(wanted)


def join(values: Sequence[Value], line: int) -> Value:
    if len(values) == 1:
        return replace(values[0], line=line)
    unknown = next((value.unknown for value in values if value.unknown is not None), None)
    recipe_warnings = dict.fromkeys(doubt for value in values for doubt in value.recipe_warnings)
    return Value("".join(value.text for value in values), line, unknown, tuple(recipe_warnings)[:MOST_DOUBTS])


def doubted(value: Value, recipe_warnings: Iterable[str]) -> Value:
    return replace(
        value, recipe_warnings=tuple(dict.fromkeys((*value.recipe_warnings, *recipe_warnings)))[:MOST_DOUBTS]
    )
