"""The syntax tree of a shell script: which commands are under which conditions, loops, functions and pipes."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from corral.migrate.shell_lexer import ArithmeticCommand, Redirection, ShellLexer, ShellToken, ShellWord
from corral.recipe.errors import RecipeError

MAX_DEPTH = 60
ENDS_OF_CASE = (";;", ";&", ";;&")
CLOSERS = ("then", "else", "elif", "fi", "do", "done", "esac", "}")


@dataclass(eq=False)
class ShellNode:
    """A part of the tree. Each is only equal to itself, so that decisions can be kept by node."""

    line: int


@dataclass(eq=False)
class SimpleCommand(ShellNode):
    words: list[ShellWord]


@dataclass(eq=False)
class ArithmeticNode(ShellNode):
    command: ArithmeticCommand


@dataclass(eq=False)
class TestCommand(ShellNode):
    """`[[ ... ]]`"""

    items: list[ShellWord | str]


@dataclass(eq=False)
class CommandGroup(ShellNode):
    body: list[ShellNode]
    is_subshell: bool = False


@dataclass(eq=False)
class IfCommand(ShellNode):
    branches: list[tuple[list[ShellNode], list[ShellNode]]]
    """Conditions with what is run; that of `else` is empty."""


@dataclass(eq=False)
class LoopCommand(ShellNode):
    """`while` and `until`, and `for ((...))` with its first and last expression."""

    condition: list[ShellNode]
    body: list[ShellNode]
    until: bool = False
    first: ShellNode | None = None
    step: ShellNode | None = None


@dataclass(eq=False)
class ForEach(ShellNode):
    name: str
    words: list[ShellWord] | None
    """None: the arguments."""
    body: list[ShellNode]


@dataclass(eq=False)
class CaseBranch(ShellNode):
    patterns: list[ShellWord]
    body: list[ShellNode]
    end: str
    """The operator behind it."""


@dataclass(eq=False)
class CaseCommand(ShellNode):
    word: ShellWord
    branches: list[CaseBranch]


@dataclass(eq=False)
class FunctionDefinition(ShellNode):
    name: str
    body: ShellNode


@dataclass(eq=False)
class Pipeline(ShellNode):
    commands: list[ShellNode]
    negated: bool = False


@dataclass(eq=False)
class AndOr(ShellNode):
    first: ShellNode
    rest: list[tuple[str, ShellNode]]


@dataclass(eq=False)
class Silenced(ShellNode):
    """A command whose output goes to a file or to standard error."""

    command: ShellNode


class ShellParser:
    def __init__(self, text: str, source: str, line: int = 1) -> None:
        self.lexer = ShellLexer(text + "\n", source, line)
        self.stream = self.lexer.tokens()
        self.token: ShellToken | None = None
        """The next token, where it was looked at."""
        self.depth = 0

    def script(self) -> list[ShellNode]:
        """Raises a RecipeError where something is left open, or stands where it cannot."""
        nodes = self._list(())
        if (token := self._peek()) is not None:
            raise self._unexpected(token)
        return nodes

    # --- tokens

    def _peek(self) -> ShellToken | None:
        if self.token is None:
            self.token = next(self.stream, None)
        return self.token

    def _take(self) -> ShellToken | None:
        token, self.token = self._peek(), None
        return token

    def _keyword(self) -> str:
        token = self._peek()
        return token.keyword if isinstance(token, ShellWord) else ""

    def _takes(self, *wanted: str) -> bool:
        """Whether the next token was one of these operators or keywords; it is taken then."""
        token = self._peek()
        found = (token if isinstance(token, str) else self._keyword()) in wanted
        if found:
            self._take()
        return found

    def _expect(self, wanted: str, opener: str, line: int) -> None:
        if self._takes(wanted):
            return
        if self._peek() is None:
            raise RecipeError(f"{self.lexer.source}:{line}: a {opener} is not closed")
        raise self._unexpected(self._peek())

    def _unexpected(self, token: ShellToken | None) -> RecipeError:
        shown = (token.plain or "a word") if isinstance(token, ShellWord) else str(getattr(token, "text", token))
        return self.lexer.problem(f"`{shown.strip() or 'the end of the line'}` cannot stand here")

    def _skip_lines(self) -> None:
        while self._takes("\n"):
            pass

    # --- lists and pipes

    def _list(self, ends: Collection[str]) -> list[ShellNode]:
        """Commands up to one of the keywords, or a bracket or operator that closes what is around."""
        nodes: list[ShellNode] = []
        while True:
            while self._takes("\n", ";"):
                pass
            token = self._peek()
            if token is None or token == ")" or token in ENDS_OF_CASE or self._keyword() in ends:
                return nodes
            node = self._and_or()
            nodes.append(CommandGroup(node.line, [node], is_subshell=True) if self._takes("&") else node)
            token = self._peek()
            if isinstance(token, str) and token not in ("\n", ";", ")", *ENDS_OF_CASE):
                raise self._unexpected(token)

    def _and_or(self) -> ShellNode:
        first, rest = self._pipeline(), list[tuple[str, ShellNode]]()
        while (token := self._peek()) in ("&&", "||"):
            self._take()
            self._skip_lines()
            rest.append((str(token), self._pipeline()))
        return AndOr(first.line, first, rest) if rest else first

    def _pipeline(self) -> ShellNode:
        negated = False
        while self._keyword() in ("!", "time"):
            negated ^= self._keyword() == "!"
            self._take()
        commands = [self._command()]
        while self._takes("|", "|&"):
            self._skip_lines()
            commands.append(self._command())
        return Pipeline(commands[0].line, commands, negated) if negated or len(commands) > 1 else commands[0]

    # --- commands

    def _command(self) -> ShellNode:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.lexer.problem("is nested too deeply")
        silenced = self._redirections()
        line, token = self.lexer.line, self._peek()
        if isinstance(token, ArithmeticCommand):
            self._take()
            node: ShellNode = ArithmeticNode(line, token)
        elif token == "(":
            self._take()
            node = CommandGroup(line, self._list(()), is_subshell=True)
            self._expect(")", "(", line)
        elif self._keyword() in COMPOUND:
            opener = self._keyword()
            self._take()
            node = COMPOUND[opener](self, line, opener)
        elif self._keyword() in CLOSERS:
            raise self._unexpected(token)
        else:
            node = self._simple()
        self.depth -= 1
        return Silenced(line, node) if self._redirections() | silenced else node

    def _redirections(self) -> bool:
        silenced = False
        while isinstance(token := self._peek(), Redirection):
            silenced |= token.takes_output
            self._take()
        return silenced

    def _simple(self) -> ShellNode:
        words, silenced = list[ShellWord](), False
        while isinstance(token := self._peek(), ShellWord | Redirection):
            if isinstance(token, Redirection):
                silenced |= token.takes_output
            else:
                words.append(token)
            self._take()
            if len(words) == 1 and self._peek() == "(":
                return self._function_body(words[0])
        if not words and not silenced:
            raise self._unexpected(self._peek())
        node = SimpleCommand(words[0].line if words else self.lexer.line, words)
        return Silenced(node.line, node) if silenced else node

    def _function(self, line: int, opener: str) -> ShellNode:
        name = self._take()
        if not isinstance(name, ShellWord):
            raise self._unexpected(name)
        return self._function_body(name)

    def _function_body(self, name: ShellWord) -> ShellNode:
        if self._takes("("):
            self._expect(")", "(", name.line)
        self._skip_lines()
        return FunctionDefinition(name.line, name.plain or "", self._command())

    def _braces(self, line: int, opener: str) -> ShellNode:
        body = self._list(("}",))
        self._expect("}", opener, line)
        return CommandGroup(line, body)

    def _test(self, line: int, opener: str) -> ShellNode:
        self.lexer.in_test = True
        items: list[ShellWord | str] = []
        while self._keyword() != "]]":
            token = self._take()
            if token is None or not isinstance(token, ShellWord | str):
                raise RecipeError(f"{self.lexer.source}:{line}: a [[ is not closed")
            if token != "\n":
                items.append(token)
        self.lexer.in_test = False
        self._take()
        return TestCommand(line, items)

    def _if(self, line: int, opener: str) -> ShellNode:
        branches = []
        while True:
            condition = self._list(("then",))
            self._expect("then", opener, line)
            branches.append((condition, self._list(("elif", "else", "fi"))))
            if not self._takes("elif"):
                break
        if self._takes("else"):
            branches.append(([], self._list(("fi",))))
        self._expect("fi", opener, line)
        return IfCommand(line, branches)

    def _loop(self, line: int, opener: str) -> ShellNode:
        return LoopCommand(line, self._list(("do",)), self._body(line, opener), opener == "until")

    def _body(self, line: int, opener: str) -> list[ShellNode]:
        while self._takes("\n", ";"):
            pass
        self._expect("do", opener, line)
        body = self._list(("done",))
        self._expect("done", opener, line)
        return body

    def _for(self, line: int, opener: str) -> ShellNode:
        token = self._take()
        if isinstance(token, ArithmeticCommand) and len(token.expressions) == 3:
            first, condition, step = (
                ArithmeticNode(line, ArithmeticCommand(token.text, (e,))) for e in token.expressions
            )
            return LoopCommand(line, [condition], self._body(line, opener), False, first, step)
        if not isinstance(token, ShellWord):
            raise self._unexpected(token)
        self._skip_lines()
        words: list[ShellWord] | None = None
        if self._takes("in"):
            words = []
            while isinstance(word := self._peek(), ShellWord):
                words.append(word)
                self._take()
        return ForEach(line, token.keyword, words, self._body(line, opener))

    def _case(self, line: int, opener: str) -> ShellNode:
        word = self._take()
        if not isinstance(word, ShellWord):
            raise self._unexpected(word)
        self._skip_lines()
        self._expect("in", opener, line)
        branches = []
        while True:
            self._skip_lines()
            if self._keyword() == "esac" or self._peek() is None:
                break
            self._takes("(")
            start, patterns = self.lexer.line, self._patterns(line)
            body, end = self._list(("esac",)), ";;"
            if (token := self._peek()) in ENDS_OF_CASE:
                end = str(token)
                self._take()
            branches.append(CaseBranch(start, patterns, body, end))
        self._expect("esac", opener, line)
        return CaseCommand(line, word, branches)

    def _patterns(self, line: int) -> list[ShellWord]:
        patterns = []
        while isinstance(token := self._take(), ShellWord):
            patterns.append(token)
            if not self._takes("|"):
                self._expect(")", "case", line)
                return patterns
        raise self._unexpected(token)


COMPOUND: dict[str, Callable[[ShellParser, int, str], ShellNode]] = {
    "if": ShellParser._if,
    "while": ShellParser._loop,
    "until": ShellParser._loop,
    "for": ShellParser._for,
    "select": ShellParser._for,
    "case": ShellParser._case,
    "{": ShellParser._braces,
    "[[": ShellParser._test,
    "function": ShellParser._function,
}
