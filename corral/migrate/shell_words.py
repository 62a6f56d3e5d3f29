"""The text of a shell script as words and operators, without redirections and the texts behind `<<`."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from corral.migrate.shell_brackets import (
    DEEPEST,
    end_of,
    end_of_here_text,
    end_of_line,
    end_of_quote,
    unescaped,
)
from corral.recipe.errors import RecipeError

OPERATORS = ("&&", "||", ";;", "|&", "|", ";", "&", "(", ")")
REDIRECTION = re.compile(r"(?:[0-9]*|&)(<<<|<<-?|<>|>>|>\||[<>]&?)")
PARAMETER = re.compile(
    r"(?P<length>#)?(?P<name>[A-Za-z_][A-Za-z0-9_]*|[0-9]{1,4}|[@*#])(?:\[(?P<index>[@*]|-?[0-9]{1,6})\])?"
    r"(?:(?P<operator>:?[-=?+]|##?|%%?|:(?=[0-9]{1,4}$))(?P<argument>.*))?",
    re.DOTALL,
)
SIMPLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?!$-]")
OF_THE_SHELL = "0?!$-"
"""`$0` and the like, which only a shell that runs knows."""
ARRAY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
COMMENT = re.compile(r"\s*(?:#[^\n]*)?")
IN_WORD = re.compile(r"[^ \t\n;|&()<>'\"\\`$]+")
IN_DEFAULT = re.compile(r"[^'\"\\`$]+")
IN_QUOTES = re.compile(r"[^\"\\`$]+")
ESCAPED_IN_QUOTES = '$`"\\\n'


@dataclass(frozen=True)
class Text:
    text: str
    quoted: bool = False


@dataclass(frozen=True)
class Variable:
    """`$NAME`, `${NAME[index]operator argument}`"""

    name: str
    quoted: bool
    written: str
    index: str | None = None
    """`@` and `*`: all of them."""
    operator: str = ""
    """`length` is `${#NAME}`; all others are as the shell writes them."""
    argument: "Word | None" = None


@dataclass(frozen=True)
class Unknown:
    """What only running something would tell."""

    what: str
    """A command, or what the shell itself would work out, as written."""
    written: str


@dataclass(frozen=True)
class Sum:
    """`$((...))`"""

    expression: "Word"


@dataclass(frozen=True)
class Array:
    """`(...)` behind `NAME=`"""

    words: tuple["Word", ...]


Part = Text | Variable | Unknown | Sum | Array


@dataclass(frozen=True)
class Word:
    parts: tuple[Part, ...]
    line: int

    @property
    def plain(self) -> str | None:
        """None: something has to be put in."""
        texts = [part.text for part in self.parts if isinstance(part, Text)]
        return "".join(texts) if len(texts) == len(self.parts) else None


@dataclass(frozen=True)
class Operator:
    text: str
    line: int


@dataclass(frozen=True)
class Arithmetic:
    """`((...))` as a command, or behind `for`"""

    text: str
    line: int


class Lexer:
    def __init__(self, text: str, source: str, line: int = 1, depth: int = 0) -> None:
        self.text, self.source, self.line, self.depth = text.replace("\r\n", "\n"), source, line, depth
        self.at = 0
        self.here: list[str] = []
        """Words that end the texts that begin on the next line."""
        self.no_sum_before = 0
        """A `((` that is two brackets: no other is looked at until it ends, or each would look through all of it."""
        if depth > DEEPEST:
            raise self.problem("is nested too deeply")

    def tokens(self) -> Iterator[Word | Operator | Arithmetic]:
        while self.at < len(self.text):
            if self._skipped():
                continue
            line = self.line
            if self._takes("\n"):
                yield Operator("\n", line)
                self._skip_here_texts()
            elif self._at_process():
                yield self._word()
            elif match := REDIRECTION.match(self.text, self.at):
                self.at = match.end()
                self._redirect(match[1])
            elif (expression := self._arithmetic()) is not None:
                yield Arithmetic(expression, line)
            elif found := next((one for one in OPERATORS if self.text.startswith(one, self.at)), None):
                self.at += len(found)
                yield Operator(found, line)
            else:
                yield self._word()

    def problem(self, what: str) -> RecipeError:
        return RecipeError(f"{self.source}:{self.line}: {what}")

    def _skipped(self) -> bool:
        """Spaces, continued lines, comments."""
        if self.text[self.at] in " \t":
            self.at += 1
        elif self.text.startswith("\\\n", self.at):
            self.at += 2
            self.line += 1
        elif self.text[self.at] == "#":
            self.at = end_of_line(self.text, self.at)
        else:
            return False
        return True

    def _takes(self, character: str) -> bool:
        if not self.text.startswith(character, self.at):
            return False
        self.at += len(character)
        self.line += character == "\n"
        return True

    def _moved(self, end: int) -> str:
        """What stands between here and `end`, which is gone to."""
        text = self.text[self.at : end]
        self.at = end
        self.line += text.count("\n")
        return text

    # --- what is no word

    def _at_process(self) -> bool:
        """`<(command)`"""
        return self.text.startswith(("<(", ">("), self.at)

    def _redirect(self, kind: str) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1
        if self._at_process() or (self.at < len(self.text) and self.text[self.at] not in "\n;|&()<>"):
            target = self._word()
            if kind in ("<<", "<<-"):
                self.here.append(target.plain or "")

    def _skip_here_texts(self) -> None:
        for word in self.here:
            self._moved(end_of_here_text(self.text, self.at, word))
        self.here = []

    def _arithmetic(self) -> str | None:
        if not self.text.startswith("((", self.at) or self.at < self.no_sum_before:
            return None
        try:
            end = end_of(self.text, self.at + 2, "((", "))", self.depth)
        except ValueError:
            end = len(self.text)
        if end < self.at + 4 or self.text[end - 2 : end] != "))":
            self.no_sum_before = end
            return None
        return self._moved(end)[2:-2]

    # --- words

    def _word(self, in_array: bool = False) -> Word:
        line, start, parts = self.line, self.at, list[Part]()
        while self.at < len(self.text):
            if self.text[self.at] == "(":
                before = parts[-1] if len(parts) == 1 else None
                if in_array or not (isinstance(before, Text) and ARRAY.fullmatch(before.text)):
                    break
                parts.append(self._array())
            elif self._at_process():
                written = self._bracketed(2, "(", ")")
                parts.append(Unknown(written[2:-1], written))
            elif self.text[self.at] in " \t\n;|&)<>":
                break
            else:
                parts += self._outside_quotes(IN_WORD)
        if self.at == start:  # a bracket that nothing belongs to
            self.at += 1
        return Word(tuple(parts), line)

    def _outside_quotes(self, plain: "re.Pattern[str]") -> list[Part]:
        """The next part of a word, or of a default in it. `plain`: what goes on as text."""
        character = self.text[self.at]
        if character == "'":
            return [Text(self._until("'"), quoted=True)]
        if character == '"':
            return self._quoted()
        if character == "\\":
            return self._escaped()
        if character == "`":
            return self._backquoted()
        if self.text.startswith("$'", self.at):
            return [Text(unescaped(self._until("$'")), quoted=True)]
        if self.text.startswith('$"', self.at):
            self.at += 1
            return self._quoted()
        if character == "$":
            return [self._dollar(quoted=False)]
        match = plain.match(self.text, self.at)
        assert match is not None
        return [Text(self._moved(match.end()))]

    def _until(self, quote: str) -> str:
        start = self.at + len(quote)
        return self._moved(self._end(end_of_quote, start, quote))[len(quote) : -1]

    def _backquoted(self) -> list[Part]:
        """Nothing where it is only a comment: a way to write one between continued lines."""
        command = self._until("`")
        return [] if COMMENT.fullmatch(command) else [Unknown(command, f"$({command})")]

    def _escaped(self) -> list[Part]:
        character = self._moved(min(self.at + 2, len(self.text)))[1:]
        return [] if character in ("", "\n") else [Text(character, quoted=True)]

    def _quoted(self) -> list[Part]:
        start = self.line
        self.at += 1
        parts: list[Part] = []
        while not self._takes('"'):
            if self.at >= len(self.text):
                self.line = start
                raise self.problem('a " is not closed')
            parts += self._in_quotes()
        return parts or [Text("", quoted=True)]

    def _in_quotes(self) -> list[Part]:
        """The next part of a text in double quotes."""
        character = self.text[self.at]
        if character == "\\" and self.at + 1 < len(self.text) and self.text[self.at + 1] in ESCAPED_IN_QUOTES:
            return self._escaped()
        if character == "`":
            return self._backquoted()
        if character == "$":
            return [self._dollar(quoted=True)]
        match = IN_QUOTES.match(self.text, self.at)
        return [Text(self._moved(match.end() if match else self.at + 1), quoted=True)]

    def _dollar(self, quoted: bool) -> Part:
        line = self.line
        if self.text.startswith("$((", self.at):
            return Sum(self._inner(self._bracketed(3, "$((", "))")[3:-2], line, quoted=True))
        if self.text.startswith("$[", self.at):
            return Sum(self._inner(self._bracketed(2, "$[", "]")[2:-1], line, quoted=True))
        if self.text.startswith("$(", self.at):
            written = self._bracketed(2, "$(", ")")
            return Unknown(written[2:-1], written)
        if self.text.startswith("${", self.at):
            return self._parameter(self._bracketed(2, "${", "}"), line, quoted)
        match = SIMPLE.match(self.text, self.at + 1)
        written = self._moved(match.end() if match else self.at + 1)
        name = written[1:]
        if not name:
            return Text("$", quoted)
        if name in OF_THE_SHELL:
            return Unknown(written, written)
        return Variable(name, quoted, written, index=name if name in "@*" else None)

    def _parameter(self, written: str, line: int, quoted: bool) -> Part:
        match = PARAMETER.fullmatch(written[2:-1])
        name, operator = (match["name"], match["operator"] or "") if match else ("0", "")
        if match is None or name == "0" or (match["length"] and operator) or (operator == ":" and name not in "@*"):
            return Unknown(written, written)
        index = match["index"] or (name if name in "@*" else None)
        if match["length"]:
            return Variable(name, quoted, written, index, "length")
        argument = None
        if operator:  # quotes count in a pattern, also where double quotes are around all of it
            argument = self._inner(match["argument"], line, quoted and operator[0] not in "#%")
        return Variable(name, quoted, written, index, operator, argument)

    def _inner(self, text: str, line: int, quoted: bool) -> Word:
        """Of a default or a sum: one word, whatever spaces are in it."""
        lexer = Lexer(text, self.source, line, self.depth + 1)
        parts: list[Part] = []
        while lexer.at < len(lexer.text):
            if not quoted:
                parts += lexer._outside_quotes(IN_DEFAULT)
            elif not lexer._takes('"'):
                parts += lexer._in_quotes()
        if quoted and not parts:
            parts = [Text("", quoted=True)]
        return Word(tuple(parts), line)

    def _bracketed(self, skip: int, opening: str, closing: str) -> str:
        """With its brackets."""
        return self._moved(self._end(end_of, self.at + skip, opening, closing, self.depth))

    def _end(self, find: Callable[..., int], *where: int | str) -> int:
        try:
            return find(self.text, *where)
        except ValueError as error:
            raise self.problem(str(error)) from None

    def _array(self) -> Array:
        start = self.line
        self.at += 1
        words = []
        while not self._takes(")"):
            if self.at >= len(self.text):
                self.line = start
                raise self.problem("a ( is not closed")
            if not self._skipped() and not self._takes("\n"):
                words.append(self._word(in_array=True))
        return Array(tuple(words))
