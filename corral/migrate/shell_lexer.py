"""The text of a shell script as words, operators and redirections, without here-documents."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from corral.recipe.errors import RecipeError

ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
ELEMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\[")
OPERATORS = ("&&", "||", ";;&", ";;", ";&", "|&", "|", ";", "&", "(", ")")
REDIRECTION = re.compile(r"([0-9]*|&)(<<<|<<-?|<>|>>|>\||[<>]&?)")
PARAMETER = re.compile(
    r"(?P<length>#)?(?P<name>[A-Za-z_][A-Za-z0-9_]*|[0-9]{1,4}|[@*#])(?:\[(?P<index>[@*]|[^]@*\[]{1,60})\])?"
    r"(?:(?P<operator>:?[-=?+]|##?|%%?|:(?=[0-9]{1,4}$)|(?:\^\^?|,,?)$|//?)(?P<argument>.*))?",
    re.DOTALL,
)
SIMPLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?!$-]")
OF_THE_SHELL = "?!$-"
"""`$?` and the like, which only a shell that runs knows."""
REPLACED = re.compile(r"((?:\\.|[^/\\'\"$`])+)(?:/(.*))?", re.DOTALL)
"""The pattern and the replacement of `${NAME/pattern/replacement}`."""
ARRAY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=")
COMMENT = re.compile(r"\s*(?:#[^\n]*)?")
IN_WORD = re.compile(r"[^ \t\n;|&()<>'\"\\`$]+")
IN_REGEX = re.compile(r"[^ \t\n'\"\\`$]+")
"""Behind `=~`, where brackets and bars are a part of the word."""
IN_DEFAULT = re.compile(r"[^'\"\\`$]+")
IN_QUOTES = re.compile(r"[^\"\\`$]+")
ESCAPED_IN_QUOTES = '$`"\\\n'
SPECIAL = re.compile(r"\\.|\$'|\$\(\(|\$\(|\$\{|<<<|<<|['\"`()}\]#\n]", re.DOTALL)
CLOSING = {"$((": "))", "$(": ")", "${": "}", '"': '"'}
SINGLE = re.compile(r"[^']*'")
ESCAPED = {
    "`": re.compile(r"[^`\\]*(?:\\.[^`\\]*)*`", re.DOTALL),
    "$'": re.compile(r"[^'\\]*(?:\\.[^'\\]*)*'", re.DOTALL),
}
HERE = re.compile(r"-?[ \t]*(?:'([^'\n]*)'|\"([^\"\n]*)\"|\\?([^\s;&|<>()'\"]+))")
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{1,4})|([0-7]{1,3})|(.))", re.DOTALL)
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v"}
MAX_DEPTH = 20


@dataclass(frozen=True)
class LiteralPart:
    text: str
    quoted: bool = False


@dataclass(frozen=True)
class VariablePart:
    """`$NAME`, `${NAME[index]operator argument}`"""

    name: str
    quoted: bool
    written: str
    index: str | None = None
    """`@` and `*`: all of them."""
    operator: str = ""
    """`length` is `${#NAME}`; all others are as the shell writes them."""
    argument: "ShellWord | None" = None
    replacement: "ShellWord | None" = None
    place: "ShellWord | None" = None
    """The index as an expression, where it is one."""


@dataclass(frozen=True)
class CommandPart:
    """`$(...)`"""

    text: str
    quoted: bool
    line: int


@dataclass(frozen=True)
class UnknownPart:
    """What only a shell that runs would know."""

    what: str
    written: str


@dataclass(frozen=True)
class ArithmeticPart:
    """`$((...))`"""

    expression: "ShellWord"


@dataclass(frozen=True)
class ArrayPart:
    """`(...)` behind `NAME=`"""

    words: tuple["ShellWord", ...]


WordPart = LiteralPart | VariablePart | CommandPart | UnknownPart | ArithmeticPart | ArrayPart


@dataclass(frozen=True)
class ShellWord:
    parts: tuple[WordPart, ...]
    line: int

    @property
    def plain(self) -> str | None:
        """The word as text, or None where a value has to be put in."""
        texts = [part.text for part in self.parts if isinstance(part, LiteralPart)]
        return "".join(texts) if len(texts) == len(self.parts) else None

    @property
    def keyword(self) -> str:
        """The word where it may be a keyword of the shell: one text without quotes."""
        first = self.parts[0] if len(self.parts) == 1 else None
        return first.text if isinstance(first, LiteralPart) and not first.quoted else ""


@dataclass(frozen=True)
class ArithmeticCommand:
    """`((...))` as a command, or behind `for`, where it has three expressions."""

    text: str
    expressions: tuple[ShellWord, ...]


@dataclass(frozen=True)
class Redirection:
    takes_output: bool
    """Whether what the command prints goes elsewhere."""


class ShellLexer:
    def __init__(self, text: str, source: str, line: int = 1, depth: int = 0) -> None:
        self.text, self.source, self.line, self.depth = text.replace("\r\n", "\n"), source, line, depth
        self.at = 0
        self.here: list[str] = []
        """Words that end the here-documents that begin on the next line."""
        self.in_test = False
        """Whether `[[` is open: there `<` and `>` compare."""
        self.no_sum_before = 0
        """A `((` that is two brackets: no other is looked at until it ends, or each would look through all of it."""
        if depth > MAX_DEPTH:
            raise self.problem("is nested too deeply")

    def tokens(self) -> Iterator["ShellToken"]:
        """Words and commands; a text is an operator."""
        word = None
        while self.at < len(self.text):
            if self._skipped():
                continue
            if self._takes("\n"):
                yield "\n"
                self._skip_here_documents()
            elif self.in_test and word and word.keyword == "=~":
                yield (word := self._word(IN_REGEX))
            elif self.in_test and self.text[self.at] in "<>":
                yield self._moved(self.at + 1)
            elif self._at_process():
                yield (word := self._word())
            elif match := REDIRECTION.match(self.text, self.at):
                self.at = match.end()
                self._redirect(match[2])
                yield Redirection(match[1] in ("", "1", "&") and match[2] in (">", ">>", ">|", ">&"))
            elif (expression := self._arithmetic()) is not None:
                parts = expression.split(";")
                yield ArithmeticCommand(expression, tuple(self._inner(one, self.line, True) for one in parts))
            elif found := next((one for one in OPERATORS if self.text.startswith(one, self.at)), None):
                self.at += len(found)
                yield found
            else:
                yield (word := self._word())

    def problem(self, what: str) -> RecipeError:
        return RecipeError(f"{self.source}:{self.line}: {what}")

    def _skipped(self) -> bool:
        """Whether spaces, a continued line or a comment were skipped."""
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
        """The text up to `end`, behind which reading goes on."""
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

    def _skip_here_documents(self) -> None:
        for word in self.here:
            self._moved(end_of_here_document(self.text, self.at, word))
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

    def _word(self, plain: "re.Pattern[str]" = IN_WORD, in_array: bool = False) -> ShellWord:
        line, start, parts = self.line, self.at, list[WordPart]()
        while self.at < len(self.text):
            if plain is IN_REGEX and self.text[self.at] not in " \t\n":
                parts += self._parts(plain)
            elif self.text[self.at] == "(":
                before = parts[-1] if len(parts) == 1 else None
                if in_array or not (isinstance(before, LiteralPart) and ARRAY.fullmatch(before.text)):
                    break
                parts.append(self._array())
            elif self._at_process():
                written = self._bracketed("<(", ")")
                parts.append(UnknownPart(written[2:-1], written))
            elif self.text[self.at] in " \t\n;|&)<>":
                break
            else:
                parts += self._parts(plain)
        if self.at == start:  # a bracket that nothing belongs to
            self.at += 1
        return ShellWord(tuple(parts), line)

    def _parts(self, plain: "re.Pattern[str]", quoted: bool = False) -> list[WordPart]:
        """The next parts of a word, of a default in it, or of a text in double quotes. `plain` goes on as text."""
        character, behind = self.text[self.at], self.text[self.at + 1 : self.at + 2]
        if character == "\\" and (not quoted or (behind and behind in ESCAPED_IN_QUOTES)):
            escaped = self._moved(min(self.at + 2, len(self.text)))[1:]
            return [] if escaped in ("", "\n") else [LiteralPart(escaped, quoted=True)]
        if character == "`":  # one that is only a comment is a way to write one between continued lines
            line, command = self.line, re.sub(r"\\([`\\$])", r"\1", self._until("`"))
            return [] if COMMENT.fullmatch(command) else [CommandPart(command, quoted, line)]
        if character == "'" and not quoted:
            return [LiteralPart(self._until("'"), quoted=True)]
        if character + behind == "$'" and not quoted:
            return [LiteralPart(unescaped(self._until("$'")), quoted=True)]
        if (character == '"' or character + behind == '$"') and not quoted:
            return self._in_double_quotes(skip=1 if character == '"' else 2)
        if character == "$":
            return [self._dollar(quoted)]
        match = plain.match(self.text, self.at)
        return [LiteralPart(self._moved(match.end() if match else self.at + 1), quoted)]

    def _until(self, quote: str) -> str:
        start = self.at + len(quote)
        return self._moved(self._end(end_of_quote, start, quote))[len(quote) : -1]

    def _in_double_quotes(self, skip: int) -> list[WordPart]:
        start = self.line
        self.at += skip
        parts: list[WordPart] = []
        while not self._takes('"'):
            if self.at >= len(self.text):
                self.line = start
                raise self.problem('a " is not closed')
            parts += self._parts(IN_QUOTES, quoted=True)
        return parts or [LiteralPart("", quoted=True)]

    def _dollar(self, quoted: bool) -> WordPart:
        line = self.line
        for opening, closing in (("$((", "))"), ("$[", "]"), ("$(", ")"), ("${", "}")):
            if self.text.startswith(opening, self.at):
                written = self._bracketed(opening, closing)
                inside = written[len(opening) : -len(closing)]
                if closing == "}":
                    return self._parameter(written, line, quoted)
                if closing == ")":
                    return CommandPart(inside, quoted, line)
                return ArithmeticPart(self._inner(inside, line, True))
        match = SIMPLE.match(self.text, self.at + 1)
        written = self._moved(match.end() if match else self.at + 1)
        name = written[1:]
        if not name:
            return LiteralPart("$", quoted)
        if name in OF_THE_SHELL:
            return UnknownPart(written, written)
        return VariablePart(name, quoted, written, index=name if name in "@*" else None)

    def _parameter(self, written: str, line: int, quoted: bool) -> WordPart:
        match = PARAMETER.fullmatch(written[2:-1])
        name, operator = (match["name"], match["operator"] or "") if match else ("", "")
        if match is None or (match["length"] and operator) or (operator == ":" and name not in "@*"):
            return UnknownPart(written, written)
        index = match["index"] or (name if name in "@*" else None)
        place = None if index in (None, "@", "*") else self._inner(index or "", line, True)
        argument = replacement = None
        if operator[:1] == "/":
            found = REPLACED.fullmatch(match["argument"])
            if found is None or found[1][0] in "#%" or "&" in (found[2] or ""):
                return UnknownPart(written, written)
            argument, replacement = self._inner(found[1], line, False), self._inner(found[2] or "", line, quoted)
        elif operator:  # quotes count in a pattern, also where double quotes are around all of it
            argument = self._inner(match["argument"], line, quoted and operator[0] not in "#%")
        operator = "length" if match["length"] else operator
        return VariablePart(name, quoted, written, index, operator, argument, replacement, place)

    def _inner(self, text: str, line: int, quoted: bool) -> ShellWord:
        """A default or an arithmetic expression as one word, whatever spaces are in it."""
        lexer = ShellLexer(text, self.source, line, self.depth + 1)
        parts: list[WordPart] = []
        while lexer.at < len(lexer.text):
            if not (quoted and lexer._takes('"')):
                parts += lexer._parts(IN_QUOTES if quoted else IN_DEFAULT, quoted)
        return ShellWord(tuple(parts or [LiteralPart("", quoted=True)] * quoted), line)

    def _bracketed(self, opening: str, closing: str) -> str:
        """What stands in the brackets at which the text is, with them."""
        shown = opening.replace("<(", "(")
        return self._moved(self._end(end_of, self.at + len(opening), shown, closing, self.depth))

    def _end(self, find: Callable[..., int], *where: int | str) -> int:
        try:
            return find(self.text, *where)
        except ValueError as error:
            raise self.problem(str(error)) from None

    def _array(self) -> ArrayPart:
        start = self.line
        self.at += 1
        words = []
        while not self._takes(")"):
            if self.at >= len(self.text):
                self.line = start
                raise self.problem("a ( is not closed")
            if not self._skipped() and not self._takes("\n"):
                words.append(self._word(in_array=True))
        return ArrayPart(tuple(words))


ShellToken = ShellWord | ArithmeticCommand | Redirection | str


# --- where quotes and brackets end, without reading what is in them


def end_of(text: str, at: int, opening: str, closing: str, depth: int = 0) -> int:
    """The place behind `closing`, for a bracket or quote whose inside begins at `at`. ValueError: it has no end."""
    if depth > MAX_DEPTH:
        raise ValueError("is nested too deeply")
    num_open, is_command = len(closing), closing == ")"
    here: list[str] = []
    while match := SPECIAL.search(text, at):
        at, found = match.end(), match[0]
        if found == closing[0]:
            num_open -= 1
            if not num_open:
                return at
        elif found == "`" or (found == "$'" and closing != '"'):
            at = end_of_quote(text, at, found)
        elif found in CLOSING:
            at = end_of(text, at, found, CLOSING[found], depth + 1)
        elif closing == '"':
            continue
        elif found == "'":
            at = end_of_quote(text, at, found)
        elif found == "(" and closing[0] == ")":
            num_open += 1
        elif found == "#" and is_command and text[match.start() - 1] in " \t\n;(&|":
            at = end_of_line(text, at)
        elif found == "<<" and is_command and (word := HERE.match(text, at)):
            at = word.end()
            here.append(next(one for one in word.groups() if one is not None))
        elif found == "\n":
            for word_at_end in here:
                at = end_of_here_document(text, at, word_at_end)
            here = []
    raise ValueError(f"a {opening} is not closed")


def end_of_quote(text: str, at: int, quote: str) -> int:
    """The place behind a single quote, `$'` or a backquote whose inside begins at `at`."""
    match = ESCAPED.get(quote, SINGLE).match(text, at)
    if match is None:
        raise ValueError(f"a {quote} is not closed")
    return match.end()


def end_of_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def end_of_here_document(text: str, at: int, word: str) -> int:
    """The place behind the line that is `word` alone; the end of the script where there is none, as for the shell."""
    match = re.compile(rf"^\t*{re.escape(word)}$\n?", re.MULTILINE).search(text, at)
    return match.end() if match else len(text)


def unescaped(text: str) -> str:
    """The inside of `$'...'` with its escapes put in."""

    def character(match: "re.Match[str]") -> str:
        if match[4] is not None:
            return ESCAPES.get(match[4], match[4] if match[4] in "\\'\"?" else match[0])
        code = int(match[1] or match[2] or match[3], 8 if match[3] else 16)
        is_character = 0 < code < (0xD800 if match[2] else 0x80)  # above: a byte of several, or no character
        return chr(code) if is_character else match[0]

    return ESCAPE.sub(character, text)


# --- assignments, and lines that end too soon


def assigned_name(word: ShellWord, quoted: bool = False) -> str | None:
    """`quoted`: also where all of it is in quotes, as behind `export`."""
    first = word.parts[0] if word.parts else None
    if not isinstance(first, LiteralPart) or (first.quoted and not quoted):
        return None
    if match := ELEMENT.match(first.text):
        texts = "".join(part.text for part in word.parts if isinstance(part, LiteralPart))
        return match[1] if re.search(r"\]\+?=", texts) else None
    match = ASSIGNMENT.match(first.text)
    return match[1] if match else None


def starts_with_bracket(word: ShellWord) -> bool:
    """`[index]=value` in an array."""
    first = word.parts[0] if word.parts else None
    return isinstance(first, LiteralPart) and not first.quoted and first.text.startswith("[") and "=" in first.text


def broken_continuations(text: str, source: str) -> Iterator[str]:
    """Lines that end in `\\` and go on in nothing, so that the rest of the command is another one."""
    lines = text.replace("\r\n", "\n").split("\n")
    start = ""
    """The line in which the command begins."""
    for number, line in enumerate(lines, start=1):
        if line.lstrip().startswith("#"):
            continue
        start = start or line
        if re.search(r"\\[ \t]+$", line):
            yield f"{source}:{number}: there is a space behind the `\\`, so that the command ends here"
        if line.endswith("\\"):
            behind = lines[number].strip() if number < len(lines) else ""
            if behind[:1] in ("", "#") and goes_on(lines, number, start):
                what = "a comment" if behind else "empty"
                yield f"{source}:{number}: the command ends here: line {number + 1} is {what}"
        else:
            start = ""


def goes_on(lines: Sequence[str], number: int, start: str) -> bool:
    """Whether the next line that says something looks like more of the command: further in, or `key=`, `--option`."""
    for place in range(number, len(lines)):
        stripped = lines[place].lstrip()
        if stripped and not stripped.startswith("#"):
            further_in = len(lines[place]) - len(stripped) > len(start) - len(start.lstrip())
            return further_in or re.match(r"""[-+~"'$]|[a-z][\w.]*=""", stripped) is not None
    return False
