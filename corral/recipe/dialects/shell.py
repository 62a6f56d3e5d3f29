"""Shell scripts, read and never run: their commands, with the script's own variables put in.

Knows what training scripts are made of: assignments, exports, arrays, quotes, continued lines, `${NAME:-default}`,
whole numbers in `$((...))`, pipes. What only running a command would tell stays unknown. Branches are not followed: the
last assignment counts. Doubts about a value go with it, and are told by whoever uses it.
"""

import ast
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from corral.recipe.dialects.shell_words import Array, Lexer, Part, Text, Unknown, Variable, Word
from corral.recipe.errors import RecipeError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
SBATCH = re.compile(r"^[ \t]*#SBATCH[ \t]+--(nodes|gpus-per-node|cpus-per-task|ntasks-per-node)[= ](\d+)", re.MULTILINE)
OF_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE",),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
}
"""Variables that Slurm sets, by the line of the script that says to what."""
OPENERS = {"if", "for", "while", "until", "case", "function", "select"}
CLOSERS = {"fi", "done", "esac"}
KEYWORDS = OPENERS | CLOSERS | {"then", "else", "elif", "do", "in", "{", "}", "!", "time"}
DECLARERS = ("export", "declare", "local", "readonly", "typeset")
LONGEST = 100_000
"""Characters of a value: variables that double each other are no script."""


@dataclass(frozen=True)
class Value:
    """A word as the shell would pass it."""

    text: str
    line: int = 0
    unknown: str | None = None
    """The command whose output is in it."""
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    words: list[Value]
    line: int
    piped: bool
    """Gets what the command before it writes."""

    @property
    def texts(self) -> list[str]:
        return [word.text for word in self.words]


@dataclass
class Script:
    commands: list[Command] = field(default_factory=list)
    exported: list[str] = field(default_factory=list)
    odd_lines: list[str] = field(default_factory=list)


def read_script(text: str, source: str, defined: Mapping[str, str] | None = None) -> Script:
    """Raises a RecipeError where quotes or brackets are left open. `defined`: variables that are set outside."""
    variables = {"HOME": [Value("~")]}
    for option, number in SBATCH.findall(text):
        variables |= {name: [Value(number)] for name in OF_SLURM[option]}
    variables |= {name: [Value(value)] for name, value in (defined or {}).items()}
    return _Reader(source, variables).read(text)


class _Reader:
    def __init__(self, source: str, variables: dict[str, list[Value]]) -> None:
        self.source, self.variables = source, variables
        self.script = Script()

    def read(self, text: str) -> Script:
        self.script.odd_lines += broken_continuations(text, self.source)
        depth, words, piped = 0, list[Word](), False
        for token in Lexer(text + "\n", self.source).tokens():
            if isinstance(token, Word):
                words.append(token)
                continue
            while words and words[0].plain in KEYWORDS:
                depth += (words[0].plain in OPENERS) - (words[0].plain in CLOSERS)
                words.pop(0)
            if words:
                self._command(words, piped, depth > 0)
            if words or token.text != "\n":
                piped = token.text in ("|", "|&")
            words = []
        return self.script

    def _command(self, words: list[Word], piped: bool, in_branch: bool) -> None:
        declares = words[0].plain in DECLARERS
        rest = [word for word in words[1:] if not (word.plain or "").startswith("-")] if declares else list(words)
        if declares:
            names = [assigned_name(word) or word.plain for word in rest]
            self.script.exported += [name for name in names if name]
        while rest and (name := assigned_name(rest[0])):
            self._assign(name, rest.pop(0), in_branch)
        passed = [] if declares else [value for word in rest for value in self._expand(word)]
        if passed:
            self.script.commands.append(Command(passed, words[0].line, piped))

    def _assign(self, name: str, word: Word, in_branch: bool) -> None:
        first, last = word.parts[0], word.parts[-1]
        assert isinstance(first, Text)
        match = ASSIGNMENT.match(first.text)
        assert match is not None
        before = self.variables.get(name, []) if match[2] else []
        if isinstance(last, Array):
            values = [*before, *(value for item in last.words for value in self._expand(item))]
        else:
            value = self._joined(Word((Text(first.text[match.end() :]), *word.parts[1:]), word.line))
            values = [join([*before[:1], value], word.line)]
        if in_branch:
            doubt = f"{self.source}:{word.line}: ${name} is set inside a branch or a loop; its last value is taken"
            values = [replace(value, doubts=(*value.doubts, doubt)) for value in values]
        self.variables[name] = values

    def _expand(self, word: Word) -> list[Value]:
        """One word may become none or several: `$ARGS`, `"${ARGS[@]}"`."""
        [variable] = word.parts if len(word.parts) == 1 else [None]
        if not isinstance(variable, Variable) or (variable.quoted and not variable.is_array):
            return [self._joined(word)]
        found = [replace(value, line=word.line) for value in self._values(variable, word.line)]
        if variable.quoted:
            return found
        return [replace(value, text=text) for value in found for text in value.text.split()]

    def _joined(self, word: Word) -> Value:
        joined = join([value for part in word.parts for value in self._part(part, word.line)], word.line)
        if len(joined.text) > LONGEST:
            raise RecipeError(f"{self.source}:{word.line}: a value has more than {LONGEST} characters")
        return joined

    def _part(self, part: Part, line: int) -> list[Value]:
        if isinstance(part, Text):
            return [Value(part.text)]
        if isinstance(part, Unknown):
            return [Value(f"$({part.command})", unknown=part.command)]
        if isinstance(part, Variable):
            return self._values(part, line)
        if isinstance(part, Array):
            return [Value("(...)")]
        inner = self._joined(part.expression)
        result = None if inner.unknown else worked_out(inner.text, self.variables)
        return [Value(f"$(({inner.text}))", unknown=inner.text) if result is None else replace(inner, text=str(result))]

    def _values(self, variable: Variable, line: int) -> list[Value]:
        values = self.variables.get(variable.name)
        if values is not None and not (variable.default is not None and [value.text for value in values] == [""]):
            return values if variable.is_array else values[:1]
        if variable.default is not None:
            return [self._joined(variable.default)]
        if not NAME.fullmatch(variable.name):
            return []
        return [Value("", doubts=(f"{self.source}:{line}: ${variable.name} is not set in the script, so it is empty",))]


def assigned_name(word: Word) -> str | None:
    first = word.parts[0] if word.parts else None
    match = ASSIGNMENT.match(first.text) if isinstance(first, Text) and not first.quoted else None
    return match[1] if match else None


def join(values: Iterable[Value], line: int) -> Value:
    values = list(values)
    unknown = next((value.unknown for value in values if value.unknown is not None), None)
    doubts = dict.fromkeys(doubt for value in values for doubt in value.doubts)
    return Value("".join(value.text for value in values), line, unknown, tuple(doubts))


def broken_continuations(text: str, source: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        if re.search(r"\\[ \t]+$", line) and not line.lstrip().startswith("#"):
            yield f"{source}:{number}: there is a space behind the `\\`, so that the command ends here"


# --- whole numbers

BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def worked_out(expression: str, variables: Mapping[str, list[Value]]) -> int | None:
    """None: it is more than whole numbers, + - * / % and variables."""
    try:
        return _number(ast.parse(expression.strip().replace("/", "//"), mode="eval").body, variables)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _number(node: ast.expr, variables: Mapping[str, list[Value]]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**18:
        return node.value
    if isinstance(node, ast.Name):
        value = variables.get(node.id, [Value("0")])[0]
        if re.fullmatch(r"-?[0-9]{1,18}", value.text):
            return int(value.text)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, variables)
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        result: int = BINARY[type(node.op)](_number(node.left, variables), _number(node.right, variables))
        if abs(result) < 10**18:
            return result
    raise ValueError("not a whole number")
