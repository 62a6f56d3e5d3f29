"""The text of a shell script as words and operators, without redirections and the texts behind `<<`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from corral.recipe.errors import RecipeError

OPERATORS = ("&&", "||", ";;", "|&", "|", ";", "&", "(", ")")
REDIRECTION = re.compile(r"(?:[0-9]*|&)(?P<kind><<<|<<-?|<>|>>|>\||<|>)(?P<stream>&[0-9-])?")
PARAMETER = re.compile(
    r"(?P<name>[A-Za-z_][A-Za-z0-9_]*|[0-9@*])(?P<array>\[[@*]\])?(?:(?P<operator>:?[-=?])(?P<default>.*))?", re.DOTALL
)
SIMPLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*]")
ARRAY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
ESCAPED_IN_QUOTES = '$`"\\'
DEEPEST = 20


@dataclass(frozen=True)
class Text:
    text: str
    quoted: bool = False


@dataclass(frozen=True)
class Variable:
    name: str
    quoted: bool
    default: "Word | None" = None
    is_array: bool = False


@dataclass(frozen=True)
class Unknown:
    """What only running a command would tell."""

    command: str


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


class Lexer:
    def __init__(self, text: str, source: str, line: int = 1, depth: int = 0) -> None:
        self.text, self.source, self.line, self.depth = text.replace("\r\n", "\n"), source, line, depth
        self.at = 0
        self.here: list[str] = []
        """Words that end the texts that begin on the next line."""
        if depth > DEEPEST:
            raise self.problem("is nested too deeply")

    def tokens(self) -> Iterator[Word | Operator]:
        while self.at < len(self.text):
            if self._skipped():
                continue
            line = self.line
            if self._takes("\n"):
                yield Operator("\n", line)
                self._skip_here_texts()
            elif match := REDIRECTION.match(self.text, self.at):
                self.at = match.end()
                self._redirect(match)
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
            end = self.text.find("\n", self.at)
            self.at = len(self.text) if end < 0 else end
        else:
            return False
        return True

    def _takes(self, character: str) -> bool:
        if not self.text.startswith(character, self.at):
            return False
        self.at += len(character)
        self.line += character == "\n"
        return True

    def _redirect(self, match: "re.Match[str]") -> None:
        if match["stream"]:
            return
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1
        if self.at < len(self.text) and self.text[self.at] not in "\n;|&()<>":
            target = self._word()
            if match["kind"].startswith("<<") and match["kind"] != "<<<":
                self.here.append(target.plain or "")

    def _skip_here_texts(self) -> None:
        for end in self.here:
            while self.at < len(self.text):
                line, _, _ = self.text[self.at :].partition("\n")
                self.at = min(self.at + len(line) + 1, len(self.text))
                self.line += 1
                if line.strip() == end:
                    break
        self.here = []

    def _word(self) -> Word:
        line, parts = self.line, list[Part]()
        while self.at < len(self.text) and self.text[self.at] not in " \t\n;|&)<>":
            character = self.text[self.at]
            if character == "(":
                before = parts[-1] if len(parts) == 1 else None
                if not (isinstance(before, Text) and ARRAY.fullmatch(before.text)):
                    break
                parts.append(self._array())
            elif character == "'":
                parts.append(Text(self._until("'"), quoted=True))
            elif character == '"':
                parts += self._quoted()
            elif character == "\\":
                parts += self._escaped()
            elif character == "`":
                parts.append(Unknown(self._until("`")))
            elif character == "$":
                parts.append(self._dollar(quoted=False))
            else:
                end = self.at + 1
                while end < len(self.text) and self.text[end] not in " \t\n;|&()<>'\"\\`$":
                    end += 1
                parts.append(Text(self.text[self.at : end]))
                self.at = end
        if not parts:  # a bracket that nothing belongs to
            self.at += 1
        return Word(tuple(parts), line)

    def _until(self, quote: str) -> str:
        end = self.text.find(quote, self.at + 1)
        if end < 0:
            raise self.problem(f"a {quote} is not closed")
        inside = self.text[self.at + 1 : end]
        self.at = end + 1
        self.line += inside.count("\n")
        return inside

    def _escaped(self) -> list[Part]:
        if self.at + 1 >= len(self.text):
            self.at += 1
            return []
        character = self.text[self.at + 1]
        self.at += 2
        self.line += character == "\n"
        return [] if character == "\n" else [Text(character, quoted=True)]

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
        if character == "\\" and self.text[self.at + 1 : self.at + 2] in (*ESCAPED_IN_QUOTES, "\n"):
            return self._escaped()
        if character == "`":
            return [Unknown(self._until("`"))]
        if character == "$":
            return [self._dollar(quoted=True)]
        self.at += 1
        self.line += character == "\n"
        return [Text(character, quoted=True)]

    def _dollar(self, quoted: bool) -> Part:
        if self.text.startswith("$((", self.at):
            return Sum(self._inner(self._bracketed(3, "(", ")", 2)))
        if self.text.startswith("$(", self.at):
            return Unknown(self._bracketed(2, "(", ")", 1))
        if self.text.startswith("${", self.at):
            return self._parameter(self._bracketed(2, "{", "}", 1), quoted)
        self.at += 1
        if not quoted and self.text.startswith("'", self.at):
            return Text(self._until("'"), quoted=True)
        match = SIMPLE.match(self.text, self.at)
        if match is None:
            return Text("$", quoted)
        self.at = match.end()
        return Variable(match[0], quoted, is_array=match[0] in "@*")

    def _parameter(self, inside: str, quoted: bool) -> Part:
        match = PARAMETER.fullmatch(inside)
        if match is None:
            return Unknown("${" + inside + "}")
        has_default = match["operator"] is not None and not match["operator"].endswith("?")
        default = self._inner(match["default"]) if has_default else None
        return Variable(match["name"], quoted, default, bool(match["array"]) or match["name"] in "@*")

    def _inner(self, text: str) -> Word:
        """Of a default or a sum: one word, whatever spaces are in it."""
        lexer = Lexer(text, self.source, self.line, self.depth + 1)
        parts: list[Part] = []
        while lexer.at < len(lexer.text):
            parts += [] if lexer._takes('"') else lexer._in_quotes()
        return Word(tuple(parts), self.line)

    def _bracketed(self, skip: int, opening: str, closing: str, depth: int) -> str:
        """What is between brackets, of which `depth` are open."""
        start = end = self.at + skip
        wanted = depth
        while depth:
            if end >= len(self.text):
                raise self.problem(f"a {self.text[self.at : start]} is not closed")
            depth += (self.text[end] == opening) - (self.text[end] == closing)
            end += 1
        self.at = end
        self.line += self.text.count("\n", start, end)
        return self.text[start : end - wanted]

    def _array(self) -> Array:
        start = self.line
        self.at += 1
        words = []
        while not self._takes(")"):
            if self.at >= len(self.text):
                self.line = start
                raise self.problem("a ( is not closed")
            if not self._skipped() and not self._takes("\n"):
                words.append(self._word())
        return Array(tuple(words))
