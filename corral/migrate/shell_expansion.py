"""The variables of a shell script, and what words become when their values are put in: patterns, braces, defaults."""

import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from corral.migrate.shell_arithmetic import assigned_names, evaluate_arithmetic
from corral.migrate.shell_lexer import (
    ArithmeticPart,
    ArrayPart,
    CommandPart,
    LiteralPart,
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
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SPACES = " \t\n"
MAX_STARS = 6
"""Number of `*` in a pattern that is compared, and characters of the text: more would take too long."""
MAX_COMPARED = 2000
CLASS = re.compile(r"\[([!^]?)((?:\]|\\.|[^\]\\:/])(?:\\.|[^\]\\:/])*)\]")
RANGE = re.compile(r"(-?[0-9]{1,9}|[A-Za-z])\.\.(-?[0-9]{1,9}|[A-Za-z])(?:\.\.(-?[0-9]{1,9}))?")
MAX_WORDS = 1000
"""Number of words that braces make of one."""


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
        self.asked_arguments = False
        """Whether arguments that are not known were asked for."""
        self.substitute: Callable[[CommandPart], ShellValue] = lambda part: ShellValue("", unknown=part.text)
        """What the command in `$(...)` prints."""
        self.num_characters = 0
        self._before: list[dict[str, list[ShellValue] | None]] = []
        """What the names that a subshell sets stood for before it, for each subshell that is open."""

    # --- variables

    def set(self, name: str, values: list[ShellValue] | None) -> None:
        if name in self.fixed:
            return
        if self._before:
            self._before[-1].setdefault(name, self.values.get(name))
        if values is None:
            self.values.pop(name, None)
        else:
            self.values[name] = values

    def extend(self, name: str, values: list[ShellValue]) -> None:
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

    def leave_subshell(self) -> list[str]:
        """Names that were set in it."""
        before = self._before.pop()
        for name, values in before.items():
            if values is None:
                self.values.pop(name, None)
            else:
                self.values[name] = values
        return list(before)

    # --- words

    def expand(self, words: Iterable[ShellWord]) -> list[ShellValue]:
        """One may become none or several: `$ARGS`, `"${ARGS[@]}"`. The warnings of none go to its neighbor."""
        found: list[ShellValue] = []
        lost: list[str] = []
        for word in itertools.chain.from_iterable(map(expand_braces, words)):
            *others, last = self._fields(word)
            for pieces in others:
                value = self.join(pieces, line_of_key(pieces) or word.line)
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
                yield WordPiece(ShellValue(part.written, unknown=part.what))
            elif isinstance(part, CommandPart):
                yield WordPiece(self.substitute(part), splits=not part.quoted)
            elif isinstance(part, ArithmeticPart):
                yield WordPiece(self.calculate(part.expression))
            elif isinstance(part, ArrayPart):
                yield WordPiece(ShellValue("(...)", unknown="(...)"))
            else:
                yield from self._variable(part, line)

    def calculate(self, expression: ShellWord) -> ShellValue:
        """The result of a sum; variables that it sets are set."""
        inner = self.joined(expression)
        used: list[ShellValue] = [inner]

        def lookup(name: str) -> str | None:
            values = self.values.get(name)
            if not values:
                used.append(ShellValue("", warnings=(self._unset(name, expression.line),)))
                return "0"
            used.append(values[0])
            return values[0].text if values[0].unknown is None else None

        results = None if inner.unknown is not None else evaluate_arithmetic(inner.text, lookup)
        if results is not None:
            result, changed = results
            value = replace(join(used, inner.line), text=str(result))
            for name, number in changed.items():
                self.set(name, [replace(value, text=str(number)), *self.values.get(name, [])[1:]])
            return value
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
        elif operator[-1:] == "?" and self._takes_argument(operator, values, unknown):
            if part.index is None and not part.name.isdigit():
                self.forget(part.name, part.name)  # the script ends here unless the user sets it
            yield WordPiece(ShellValue(part.written, unknown=part.name))
        elif operator[-1:] == "+":
            yield from [WordPiece(ShellValue(""))] if part.quoted and part.index is None else []
        elif not values:
            yield from self._nothing(part, line)
        else:
            changes = operator[:1] and operator[:1] in "#%/^,"
            yield from self._all(part, [self._changed(part, value) for value in values] if changes else values, line)

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
            self.set(part.name, [self.joined(part.argument)])
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
        is_argument = part.name in ("@", "*", "#") or (part.name.isdigit() and part.name != "0")
        self.asked_arguments |= is_argument and self.arguments is None
        if part.name in ("@", "*"):
            skipped = int(part.argument.plain or 0) if part.operator == ":" and part.argument else 1
            return arguments[self.num_shifted + max(skipped - 1, 0) :]
        if part.name == "#":
            warnings = (self._unset("#", 0),) if self.arguments is None else ()
            return [ShellValue(str(max(len(arguments) - self.num_shifted, 0)), warnings=warnings)]
        if part.name == "0":
            return self.values.get("0")
        if part.name.isdigit() and self.arguments is not None:
            place = int(part.name) + self.num_shifted
            return arguments[place - 1 : place]
        name = str(int(part.name) + self.num_shifted) if part.name.isdigit() else part.name
        values = self.values.get(name)
        if values is None or part.index in ("@", "*"):
            return values
        index = ShellValue("0") if part.place is None else self.calculate(part.place)
        if index.unknown is not None:
            return [ShellValue(part.written, unknown=index.unknown)]
        place = int(index.text)
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

    def _changed(self, part: VariablePart, value: ShellValue) -> ShellValue:
        """A value with what `#`, `%`, `/`, `^` or `,` does to it."""
        text, unknown = None, value.unknown
        pieces = self.patterns(part.argument)
        if part.operator[0] in "^,":
            change = str.upper if part.operator[0] == "^" else str.lower
            end = len(value.text) if len(part.operator) == 2 else 1
            text = change(value.text[:end]) + value.text[end:] if value.text.isascii() else None
        elif (pattern := glob_pattern(pieces)) is not None and len(value.text) <= MAX_COMPARED:
            text = without_affix(value.text, part.operator, pattern)
            if part.replacement is not None:
                pieces.append(WordPiece(new := self.joined(part.replacement)))
                unknown = unknown or new.unknown
                text = re.sub(pattern, lambda _: new.text, value.text, count=len(part.operator) == 1, flags=re.DOTALL)
        if text is None or unknown is not None:
            return ShellValue(part.written, unknown=unknown or part.written)
        return with_warnings(replace(value, text=text), [one for piece in pieces for one in piece.value.warnings])

    def patterns(self, word: ShellWord | None) -> list[WordPiece]:
        """The pieces of a pattern. What is in quotes does not split, and stands for itself."""
        return [] if word is None else list(self._pieces(word.parts, word.line, in_default=True))


def glob_pattern(pieces: Sequence[WordPiece]) -> str | None:
    """A pattern of the shell as a regular expression. None: it is more than this knows."""
    found, num_stars = "", 0
    for value, is_pattern, _ in pieces:
        if value.unknown is not None:
            return None
        text, at = value.text, 0
        while at < len(text):
            character = text[at]
            at += 1
            if not is_pattern or character not in "*?[\\":
                found += re.escape(character)
            elif character == "[":
                if (match := CLASS.match(text, at - 1)) is None:
                    return None
                at = match.end()
                inside = re.sub(r"([\[\]&~|^])", r"\\\1", match[2].replace("\\", ""))
                found += f"[{'^' * bool(match[1])}{inside}]"
            elif character == "\\":
                found += re.escape(text[at : at + 1])
                at += 1
            else:
                found += ".*" if character == "*" else "."
                num_stars += character == "*"
    return found if num_stars <= MAX_STARS else None


def without_affix(text: str, operator: str, pattern: str) -> str:
    """`text` less what fits at its start (#) or end (%): the shortest, and with two signs the longest."""
    regex = re.compile(pattern, re.DOTALL)
    places = range(len(text) + 1)
    if operator[0] == "#":
        ends = [end for end in (reversed(places) if len(operator) == 2 else places) if regex.fullmatch(text, 0, end)]
        return text[ends[0] :] if ends else text
    starts = [start for start in (places if len(operator) == 2 else reversed(places)) if regex.fullmatch(text, start)]
    return text[: starts[0]] if starts else text


def line_of_key(pieces: Sequence[ShellValue]) -> int:
    """The line in which `key=` stands, where that comes from an array or another variable as a whole; else 0."""
    return next((piece.line for piece in pieces[:1] if "=" in piece.text), 0)


def expand_braces(word: ShellWord) -> Iterator[ShellWord]:
    """`a{b,c}` is two words, `{1..3}` three."""
    if not any(isinstance(part, LiteralPart) and not part.quoted and "{" in part.text for part in word.parts):
        yield word
        return
    atoms: list[WordPart | str] = []
    for part in word.parts:
        atoms += part.text if isinstance(part, LiteralPart) and not part.quoted else [part]
    for found in itertools.islice(alternatives(tuple(atoms)), MAX_WORDS):
        parts: list[WordPart] = []
        for atom in found:
            before = parts[-1] if parts else None
            if not isinstance(atom, str):
                parts.append(atom)
            elif isinstance(before, LiteralPart) and not before.quoted:
                parts[-1] = LiteralPart(before.text + atom)
            else:
                parts.append(LiteralPart(atom))
        if parts:
            yield ShellWord(tuple(parts), word.line)


def alternatives(atoms: "tuple[WordPart | str, ...]") -> "Iterator[tuple[WordPart | str, ...]]":
    """What braces make of a word. A text is one character without quotes; all else is as it is."""
    for start, atom in enumerate(atoms):
        if atom != "{":
            continue
        depth, commas = 1, [start]
        for end in range(start + 1, len(atoms)):
            depth += (atoms[end] == "{") - (atoms[end] == "}")
            if depth == 0:
                break
            if depth == 1 and atoms[end] == ",":
                commas.append(end)
        else:
            continue
        if len(commas) > 1:
            inner = [atoms[left + 1 : right] for left, right in itertools.pairwise([*commas, end])]
            middles = [found for one in inner for found in alternatives(one)]
        else:
            middles = [tuple(text) for text in brace_range(atoms[start + 1 : end])]
        if middles:
            behind = list(itertools.islice(alternatives(atoms[end + 1 :]), MAX_WORDS))
            yield from ((*atoms[:start], *middle, *rest) for middle in middles for rest in behind)
            return
    yield atoms


def brace_range(atoms: "Sequence[WordPart | str]") -> list[str]:
    """What `1..3` or `a..c` counts; nothing where it is not that."""
    match = RANGE.fullmatch("".join(atom if isinstance(atom, str) else "$" for atom in atoms))
    if match is None or match[1].isalpha() != match[2].isalpha():
        return []
    first, last = (ord(one) if one.isalpha() else int(one) for one in match.groups()[:2])
    step = abs(int(match[3] or 1)) or 1
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    if match[1].isalpha():
        return [chr(number) for number in numbers]
    padded = any(re.match("-?0[0-9]", one) for one in match.groups()[:2])
    width = max(len(one) for one in match.groups()[:2]) if padded else 0
    return [f"{number:0{width}d}" for number in itertools.islice(numbers, MAX_WORDS)]


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


# --- what commands print


def printed_by(texts: Sequence[str], scope: ShellScope) -> str | None:
    """What a command prints that only takes texts apart. None: only running it would show."""
    command, *rest = texts
    [here] = scope.values["PWD"][:1]
    paths = [text for text in rest if not text.startswith("-")]
    match command:
        case "echo" if not (rest and rest[0][:1] == "-"):
            return " ".join(rest) + "\n"
        case "echo" if rest[0] == "-n":
            return " ".join(rest[1:])
        case "printf" if len(rest) == 2 and re.fullmatch(r"[^%\\]*%s[^%\\]*(\\n)?", rest[0]):
            return rest[0].replace("%s", rest[1]).replace("\\n", "\n")
        case "printf" if len(rest) == 1 and not re.search(r"[%\\]", rest[0]):
            return rest[0]
        case "pwd":
            return here.text + "\n"
        case "date":
            return ""
        case "true" | ":" | "false":
            return ""
        case "dirname" if len(paths) == 1:
            folder, slash, _ = paths[0].rstrip("/").rpartition("/")
            return (folder.rstrip("/") or "/" if slash else ".") + "\n"
        case "basename" if len(paths) == 1:
            return (paths[0].rstrip("/").rpartition("/")[2] or "/") + "\n"
        case "realpath" | "readlink" if len(paths) == 1:
            return joined_path(here.text, paths[0]) + "\n"
        case "seq" if 1 <= len(rest) <= 2 and all(re.fullmatch("[0-9]{1,4}", text) for text in rest):
            first, last = [1, *map(int, rest)][-2:]
            return "".join(f"{number}\n" for number in range(first, last + 1))
    return None


def joined_path(here: str, path: str) -> str:
    return os.path.normpath(path if path.startswith("~") else os.path.join(here, path))
