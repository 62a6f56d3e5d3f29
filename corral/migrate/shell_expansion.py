"""The variables of a shell script, and what words become when their values are put in; arithmetic as in `$((...))`."""

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from corral.migrate.shell_lexer import (
    ArithmeticPart,
    ArrayPart,
    LiteralPart,
    ShellLexer,
    ShellWord,
    UnknownPart,
    VariablePart,
    WordPart,
)
from corral.recipe.errors import RecipeError

MAX_LENGTH = 100_000
"""Characters of a value: variables that double each other are no script."""
MAX_CHARACTERS = 5_000_000
"""Characters of all values together, with EXTRA for each: arrays that double each other are none either."""
EXTRA_CHARACTERS = 50
MAX_WARNINGS = 20
"""Number of warnings about one value that are kept; who has read these needs no more."""
PRINTING = re.compile(r"\s*(?P<program>pwd|date|basename|dirname)(?:\s+(?P<rest>[^\s;|&<>()`]+|\+[^;|&<>()`]+))?\s*")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SPACES = " \t\n"
WILD = re.compile(r"[*?\[\\]")
TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]{1,15}|[0-9]{1,18})(?![\w#])|([A-Za-z_][A-Za-z0-9_]*)|(\*\*|\+(?!\+)|-(?!-)|[*/%()]))"
)
CHANGED = re.compile(
    r"(?:\+\+|--)\s*([A-Za-z_]\w*)|\b([A-Za-z_]\w*)(?:\[[^]]{0,100}\])?\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))",
    re.ASCII,
)
STRENGTH = {"+": 1, "-": 1, "*": 2, "/": 2, "%": 2, "**": 3}
MAX_EXPRESSION = 1000
"""Characters of a sum."""
LARGEST = 10**18
LARGEST_POWER = 64


@dataclass(frozen=True)
class ShellValue:
    """A word as the shell would pass it."""

    text: str
    line: int = 0
    unknown: str | None = None
    """The command whose output is in it, or what else only a shell that runs would know."""
    warnings: tuple[str, ...] = ()


class WordPiece(NamedTuple):
    """A piece of a word with its value put in."""

    value: ShellValue
    splits: bool = False
    """Whether it is split at spaces, since it comes from a variable outside quotes."""
    starts: bool = False
    """Whether another word begins with it, as with the next element of an array."""


class ShellScope:
    """The values of variables at the line that is being read."""

    def __init__(self, source: str, values: dict[str, list[ShellValue]], fixed: frozenset[str] = frozenset()) -> None:
        self.source, self.values, self.fixed = source, values, fixed
        """`fixed`: names whose values the user gave, whatever the script says."""
        self.arguments: list[ShellValue] | None = None
        """Arguments of `set -- a b`. None: they are whatever the script is called with."""
        self.num_shifted = 0
        self.caller = "the script"
        """The script or function whose arguments `$1` and so on are."""
        self.in_branch = False
        """Whether what is read is run under a condition only."""
        self.num_characters = 0
        self._before: list[dict[str, list[ShellValue] | None]] = []
        """What the names that a subshell sets stood for before it, for each subshell that is open."""

    # --- variables

    def assign(self, name: str, values: list[ShellValue], line: int, appends: bool = False) -> None:
        if self.in_branch:
            warning = f"{self.source}:{line}: ${name} is set inside a branch or a loop; its last value is taken"
            values = [with_warnings(value, [warning]) for value in values]
        if appends:
            self._extend(name, values)
        else:
            self.set(name, values)

    def set(self, name: str, values: list[ShellValue] | None) -> None:
        if name in self.fixed:
            return
        if self._before:
            self._before[-1].setdefault(name, self.values.get(name))
        if values is None:
            self.values.pop(name, None)
        else:
            self.values[name] = values

    def _extend(self, name: str, values: list[ShellValue]) -> None:
        """Appends in place where no subshell needs the array as it was: a thousand of these must not copy it."""
        if name in self.values and name not in self.fixed and (not self._before or name in self._before[-1]):
            self.values[name] += values
        else:
            self.set(name, [*self.values.get(name, []), *values])

    def forget(self, name: str, why: str) -> None:
        """The variable has another value from here on, which only a shell that runs would know."""
        self.set(name, [ShellValue(f"${name}", unknown=why)])

    def enter_subshell(self) -> None:
        self._before.append({})

    def leave_subshell(self) -> None:
        for name, values in self._before.pop().items():
            if values is None:
                self.values.pop(name, None)
            else:
                self.values[name] = values

    # --- words

    def expand(self, words: Iterable[ShellWord]) -> list[ShellValue]:
        """One may become none or several: `$ARGS`, `"${ARGS[@]}"`. The warnings of none go to its neighbour."""
        found: list[ShellValue] = []
        lost: list[str] = []
        for word in words:
            *others, last = self._fields(word)
            for pieces in others:
                value = self.join(pieces, word.line)
                found.append(with_warnings(value, lost) if lost else value)
                lost = []
            lost += [warning for value in last for warning in value.warnings]
        if found and lost:
            found[-1] = with_warnings(found[-1], lost)
        return found

    def _fields(self, word: ShellWord) -> list[list[ShellValue]]:
        """The words that one becomes, each as pieces, and last the pieces that become none."""
        fields: list[list[ShellValue]] = [[]]
        there = False
        for value, splits, starts in self._counted(word):
            separators = self._separators() if splits and value.unknown is None else ""
            texts = re.split(f"[{re.escape(separators)}]+", value.text) if separators else [value.text]
            for number, text in enumerate(texts):
                if there and (number or starts):
                    fields.append([])
                    there = False
                fields[-1].append(value if text == value.text else replace(value, text=text))
                there = there or not splits or text != ""
        return [*fields, []] if there else fields

    def _separators(self) -> str:
        values = self.values.get("IFS")
        return values[0].text[:20] if values and values[0].unknown is None else SPACES

    def joined(self, word: ShellWord) -> ShellValue:
        """All that a word becomes as one value, as behind `NAME=`."""
        values: list[ShellValue] = []
        for piece in self._counted(word):
            values += [ShellValue(" "), piece.value] if piece.starts else [piece.value]
        return self.join(values, word.line)

    def _counted(self, word: ShellWord) -> Iterator[WordPiece]:
        for piece in self._pieces(word.parts, word.line):
            self._count(len(piece.value.text) + EXTRA_CHARACTERS, word.line)
            yield piece

    def _count(self, num_characters: int, line: int) -> None:
        self.num_characters += num_characters
        if self.num_characters > MAX_CHARACTERS:
            raise RecipeError(f"{self.source}:{line}: all values together have more than {MAX_CHARACTERS} characters")

    def join(self, values: Sequence[ShellValue], line: int) -> ShellValue:
        if sum(len(value.text) for value in values) > MAX_LENGTH:
            raise RecipeError(f"{self.source}:{line}: a value has more than {MAX_LENGTH} characters")
        return join(values, line)

    # --- what is put in

    def _pieces(self, parts: Iterable[WordPart], line: int, in_default: bool = False) -> Iterator[WordPiece]:
        for part in parts:
            if isinstance(part, LiteralPart):
                yield WordPiece(ShellValue(part.text), in_default and not part.quoted)
            elif isinstance(part, UnknownPart):
                yield WordPiece(self._printed(part, line))
            elif isinstance(part, ArithmeticPart):
                yield WordPiece(self._sum(part))
            elif isinstance(part, ArrayPart):
                yield WordPiece(ShellValue("(...)", unknown="(...)"))
            else:
                yield from self._variable(part, line)

    def _printed(self, part: UnknownPart, line: int) -> ShellValue:
        """What a command would print, where that is only a text taken apart, or the day."""
        match = PRINTING.fullmatch(part.what)
        if match is None:
            return ShellValue(part.written, unknown=part.what)
        if match["program"] == "pwd":
            return ShellValue(".")
        if match["program"] == "date":
            return ShellValue("", warnings=(f"{self.source}:{line}: what `date` prints is left out",))
        [word] = list(ShellLexer(match["rest"], self.source, line).tokens())[:1]
        value = self.joined(word) if isinstance(word, ShellWord) else ShellValue(part.written, unknown=part.what)
        folder, _, name = value.text.rstrip("/").rpartition("/")
        return replace(value, text=name if match["program"] == "basename" else folder or ".")

    def _sum(self, part: ArithmeticPart) -> ShellValue:
        inner = self.joined(part.expression)
        used: list[ShellValue] = [inner]

        def lookup(name: str) -> str | None:
            values = self.values.get(name)
            if not values:
                used.append(ShellValue("", warnings=(self._unset(name, part.expression.line),)))
                return "0"
            used.append(values[0])
            return values[0].text if values[0].unknown is None else None

        result = None if inner.unknown is not None else evaluate_arithmetic(inner.text, lookup)
        if result is not None:
            return replace(join(used, inner.line), text=str(result))
        written = f"$(({inner.text}))"
        for name in assigned_names(inner.text):
            self.forget(name, written)
        return ShellValue(written, unknown=first_unknown(used) or written)

    def _variable(self, part: VariablePart, line: int) -> Iterator[WordPiece]:
        values, operator = self._stored(part) or [], part.operator
        self._count(len(values), line)  # all are looked at, also where none is put in
        unknown = first_unknown(values)
        if operator == "length":
            yield WordPiece(self._length(part, values, unknown, line))
        elif operator[-1:] in ("-", "=", "+") and self._takes_argument(operator, values, unknown):
            yield from self._argument(part, unknown, line)
        elif operator[-1:] == "+":
            yield from [WordPiece(ShellValue(""))] if part.quoted and part.index is None else []
        elif not values:
            yield from self._nothing(part, line)
        else:
            yield from self._all(part, self._trimmed(part, values) if operator[:1] in ("#", "%") else values, line)

    def _takes_argument(self, operator: str, values: Sequence[ShellValue], unknown: str | None) -> bool:
        """Whether `${A:-x}` or `${A:+x}` is `x`. With `:`, what is empty counts as not set."""
        is_set = bool(values) and (operator[0] != ":" or unknown is not None or any(value.text for value in values))
        return is_set == (operator[-1] == "+")

    def _argument(self, part: VariablePart, unknown: str | None, line: int) -> Iterator[WordPiece]:
        assert part.argument is not None
        if unknown is not None:
            yield WordPiece(ShellValue(part.written, unknown=unknown))
            return
        if part.operator[-1] == "=":
            self.assign(part.name, [self.joined(part.argument)], line)
        yield from self._pieces(part.argument.parts, line, in_default=True)

    def _all(self, part: VariablePart, values: Sequence[ShellValue], line: int) -> Iterator[WordPiece]:
        if part.quoted and part.index == "*":
            between = ShellValue(self._separators()[:1])
            yield WordPiece(self.join([one for value in values for one in (between, value)][1:], line))
            return
        for number, value in enumerate(values):
            yield WordPiece(value, splits=not part.quoted, starts=number > 0)

    def _stored(self, part: VariablePart) -> list[ShellValue] | None:
        """The values of a variable; None or nothing where it is not set."""
        arguments = self.arguments or []
        if part.name in ("@", "*"):
            skipped = int(part.argument.plain or 0) if part.operator == ":" and part.argument else 1
            return arguments[self.num_shifted + max(skipped - 1, 0) :]
        if part.name == "#":
            return None if self.arguments is None else [ShellValue(str(max(len(arguments) - self.num_shifted, 0)))]
        if part.name.isdigit() and self.arguments is not None:
            place = int(part.name) + self.num_shifted
            return arguments[place - 1 : place]
        name = str(int(part.name) + self.num_shifted) if part.name.isdigit() else part.name
        values = self.values.get(name)
        if values is None or part.index in ("@", "*"):
            return values
        place = int(part.index or 0)
        unknown = first_unknown(values if place < 0 else values[: place + 1])
        if place and unknown is not None:
            return [ShellValue(part.written, unknown=unknown)]
        return [values[place]] if -len(values) <= place < len(values) else None

    def _nothing(self, part: VariablePart, line: int) -> Iterator[WordPiece]:
        """What is not set is empty, and no word where it is all of an array."""
        if part.name in "@*":
            return
        is_known = part.name in self.values or (self.arguments is not None and not NAME.fullmatch(part.name))
        warnings = () if is_known else (self._unset(part.name, line),)
        yield WordPiece(ShellValue("", warnings=warnings), splits=not part.quoted or part.index == "@")

    def _unset(self, name: str, line: int) -> str:
        where = f"{self.source}:{line}: ${name} is"
        if name == "#":
            return f"{where} how many arguments {self.caller} gets, which is not known here"
        if name.isdigit():
            number = int(name) + self.num_shifted
            return f"{where} an argument of {self.caller}; give it with --define {number}=VALUE"
        return f"{where} not set in the script, so it is empty"

    def _length(self, part: VariablePart, values: list[ShellValue], unknown: str | None, line: int) -> ShellValue:
        if unknown is not None:
            return ShellValue(part.written, unknown=unknown)
        length = len(values) if part.index in ("@", "*") else sum(len(value.text) for value in values)
        nothing = [] if values else [piece.value for piece in self._nothing(part, line)]
        return replace(join([*values, *nothing], line), text=str(length))

    def _trimmed(self, part: VariablePart, values: Sequence[ShellValue]) -> list[ShellValue]:
        assert part.argument is not None
        pieces = list(self._pieces(part.argument.parts, part.argument.line, in_default=True))
        pattern, warnings = simple_pattern(pieces), [warning for piece in pieces for warning in piece.value.warnings]
        trimmed = []
        for value in values:
            if pattern is None or value.unknown is not None:
                trimmed.append(ShellValue(part.written, unknown=value.unknown or part.written))
            else:
                value = replace(value, text=without_affix(value.text, part.operator, *pattern))
                trimmed.append(with_warnings(value, warnings) if warnings else value)
        return trimmed


def simple_pattern(pieces: Sequence[WordPiece]) -> tuple[str, bool, bool] | None:
    """A text, and whether a `*` stands before or behind it. None: it is more than that."""
    shape = "".join(piece.value.text if piece.splits else WILD.sub("x", piece.value.text) for piece in pieces)
    first, last = shape[:1] == "*", len(shape) > 1 and shape[-1] == "*"
    plain = slice(int(first), len(shape) - last)
    if WILD.search(shape[plain]) or (first and last) or any(piece.value.unknown is not None for piece in pieces):
        return None
    return "".join(piece.value.text for piece in pieces)[plain], first, last


def without_affix(text: str, operator: str, wanted: str, first: bool, last: bool) -> str:
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


def join(values: Sequence[ShellValue], line: int) -> ShellValue:
    if len(values) == 1:
        return replace(values[0], line=line)
    warnings = dict.fromkeys(warning for value in values for warning in value.warnings)
    text, unknown = "".join(value.text for value in values), first_unknown(values)
    return ShellValue(text, line, unknown, tuple(warnings)[:MAX_WARNINGS])


def first_unknown(values: Iterable[ShellValue]) -> str | None:
    return next((value.unknown for value in values if value.unknown is not None), None)


def with_warnings(value: ShellValue, warnings: Iterable[str]) -> ShellValue:
    return replace(value, warnings=tuple(dict.fromkeys((*value.warnings, *warnings)))[:MAX_WARNINGS])


# --- arithmetic with whole numbers, as the shell does it: + - * / % and small powers


def evaluate_arithmetic(expression: str, lookup: Callable[[str], str | None]) -> int | None:
    """The result, or None where it is more than this knows. `lookup` gives a variable's text, or None."""
    try:
        sum_ = _ArithmeticReader(expression.strip(), lookup)
        result = sum_.value(0)
        return result if sum_.next is None else None
    except (ValueError, ArithmeticError, RecursionError):
        return None


def assigned_names(expression: str) -> set[str]:
    """Variables that a sum sets: `A++`, `A=3`."""
    return {before or behind for before, behind in CHANGED.findall(expression)}


class _ArithmeticReader:
    def __init__(self, text: str, lookup: Callable[[str], str | None]) -> None:
        if len(text) > MAX_EXPRESSION:
            raise ValueError("too long")
        self.text, self.lookup, self.at = text, lookup, 0
        self.next: str | None = None
        self._move()

    def _move(self) -> None:
        match = TOKEN.match(self.text, self.at)
        if match is None and self.at < len(self.text):
            raise ValueError(f"what `{self.text[self.at :]}` means is not known")
        self.next, self.at = (match[0].strip(), match.end()) if match else (None, self.at)

    def value(self, weakest: int) -> int:
        """The next number with the operators behind it that bind stronger than `weakest`."""
        left = self._number()
        while self.next in STRENGTH and (strength := STRENGTH[self.next]) > weakest:
            sign = self.next
            self._move()
            left = apply_operator(left, sign, self.value(strength - (sign == "**")))  # powers from the right
        return left

    def _number(self) -> int:
        token = self.next
        if token is None:
            raise ValueError("it ends too early")
        self._move()
        if token in ("-", "+"):
            return -self._number() if token == "-" else self._number()
        if token == "(":
            inside = self.value(0)
            if self.next != ")":
                raise ValueError("a bracket is not closed")
            self._move()
            return inside
        return parse_number(self.lookup(token) if re.match(r"[A-Za-z_]", token) else token)


def parse_number(text: str | None) -> int:
    match = re.fullmatch(r"\s*([-+]?)(0[xX][0-9a-fA-F]{1,15}|0[0-7]{0,18}|[1-9][0-9]{0,17})?\s*", text or "0")
    if text is None or match is None or (match[1] and not match[2]):
        raise ValueError("not a whole number")
    digits = match[2] or "0"
    base = 16 if digits[:2] in ("0x", "0X") else 8 if digits[0] == "0" else 10
    return int(match[1] + digits, base)


def apply_operator(left: int, sign: str, right: int) -> int:
    """Division goes towards 0, and the remainder with it; not as in Python."""
    if sign == "**" and not 0 <= right <= LARGEST_POWER:
        raise ValueError("too large a power")
    if sign in "/%":
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
        result = quotient if sign == "/" else left - quotient * right
    else:
        result = {"+": operator.add, "-": operator.sub, "*": operator.mul, "**": operator.pow}[sign](left, right)
    if abs(result) >= LARGEST:
        raise ValueError("too large")
    return result
