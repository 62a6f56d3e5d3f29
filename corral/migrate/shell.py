"""Shell scripts, read and never run: their commands, with the script's own variables put in.

Knows what training scripts are made of: assignments, exports, arrays, quotes, continued lines, `${NAME:-default}`,
whole numbers in `$((...))`, pipes. What only running a command would show stays unknown. Branches are not followed: the
last assignment counts. Warnings about a value go with it, and are reported by whoever uses it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from corral.migrate.shell_expansion import NAME, ShellScope, ShellValue, assigned_names
from corral.migrate.shell_lexer import ArithmeticCommand, ArrayPart, LiteralPart, ShellLexer, ShellWord

ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
ELEMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\[")
SBATCH = re.compile(r"^[ \t]*#SBATCH[ \t]+--(nodes|gpus-per-node|cpus-per-task|ntasks-per-node)[= ](\d+)", re.MULTILINE)
OF_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE",),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
}
"""Variables that Slurm sets, by the line of the script that says to what."""
LOOPS = ("for", "while", "until", "select")
CLOSERS = {"if": "fi", "case": "esac", "{": "}", "(": ")", **dict.fromkeys(LOOPS, "done")}
KEYWORDS = CLOSERS.keys() | CLOSERS.values() | {"then", "else", "elif", "do", "in", "!", "time", "function"}
DECLARERS = ("export", "declare", "local", "readonly", "typeset")
CHANGING = "inAlu"
"""Options of `declare` with which a value is not what is written: whole numbers, references, tables, small letters."""
SETTERS = ("read", "mapfile", "readarray", "getopts")


@dataclass(frozen=True)
class ShellCommand:
    words: list[ShellValue]
    line: int
    piped: bool
    """Gets what the command before it writes."""

    @property
    def texts(self) -> list[str]:
        return [word.text for word in self.words]


@dataclass
class ShellScript:
    commands: list[ShellCommand] = field(default_factory=list)
    exported: list[str] = field(default_factory=list)
    broken_lines: list[str] = field(default_factory=list)


def read_script(text: str, source: str, defined: Mapping[str, str] | None = None) -> ShellScript:
    """Raises a RecipeError where quotes or brackets are left open. `defined`: what the user sets; `1` is `$1`."""
    variables = {"HOME": [ShellValue("~")]}
    for option, number in SBATCH.findall(text):
        variables |= {name: [ShellValue(number)] for name in OF_SLURM[option]}
    variables |= {name: [ShellValue(value)] for name, value in (defined or {}).items()}
    return _ScriptReader(source, ShellScope(source, variables, frozenset(defined or ()))).read(text)


@dataclass
class _OpenBlock:
    """What is open: an `if`, a loop, a function, brackets."""

    closer: str
    is_branch: bool
    in_pattern: bool = False
    """Whether the pattern of a `case` is open: what stands before the next `)` is no command."""
    caller: "tuple[str, list[ShellValue] | None, int] | None" = None
    """Around a function: whose arguments `$1` and so on are there, these arguments, and how many were shifted."""


class _ScriptReader:
    def __init__(self, source: str, scope: ShellScope) -> None:
        self.source, self.scope = source, scope
        self.script = ShellScript()
        self.blocks: list[_OpenBlock] = []
        self.is_behind = False
        """Whether a command stands behind `&&` or `||`."""
        self.function = ""
        """What was seen of a function: its `name`, then its `brackets`, then its `body` comes."""

    def read(self, text: str) -> ShellScript:
        self.script.broken_lines += broken_continuations(text, self.source)
        words, piped, in_test = list[ShellWord](), False, False
        for token in ShellLexer(text + "\n", self.source).tokens():
            if isinstance(token, ShellWord):
                if token.plain == "[[":
                    in_test = in_test or all(word.plain in KEYWORDS for word in words)
                in_test = in_test and token.plain != "]]"
                words.append(token)
            elif isinstance(token, ArithmeticCommand):
                self._open_blocks(words)
                words = []
                self._calculate(token.text, f"(({token.text}))")
            elif not in_test or token == "\n":
                in_test = False
                self._end_command(words, piped, token)
                if words or token != "\n":
                    piped = token in ("|", "|&")
                words = []
        return self.script

    # --- what is open

    def _end_command(self, words: list[ShellWord], piped: bool, end: str) -> None:
        case = self.blocks[-1] if self.blocks and self.blocks[-1].in_pattern else None
        if case and not (words and words[0].plain == "esac"):
            case.in_pattern = end != ")"
            return
        rest = self._open_blocks(words)
        if end == "(" and (self.function == "name" or (len(rest) == 1 and self.function != "body")):
            self.function = "brackets"
            return
        if end == ")" and self.function == "brackets":
            self.function = "body"
            return
        if rest:
            self.function = ""
            self.scope.in_branch = self.is_behind or self._in_branch()
            self._command(rest, piped)
        if end == "(":
            self._open("(")
        elif end == ")" and self.blocks and self.blocks[-1].in_pattern:
            self.blocks[-1].in_pattern = False
        elif end == ")":
            self._close(")")
        elif end == ";;" and self.blocks and self.blocks[-1].closer == "esac":
            self.blocks[-1].in_pattern = True
        goes_on = end in ("|", "|&", "(") or (end == "\n" and not words)
        self.is_behind = end in ("&&", "||") or (self.is_behind and goes_on)

    def _open_blocks(self, words: Sequence[ShellWord]) -> list[ShellWord]:
        """What is left without the keywords in front."""
        at = 0
        while at < len(words) and (keyword := words[at].plain or "") in KEYWORDS:
            at += 1
            if keyword == "function":
                self.function = "name"
                at += 1
            elif keyword in CLOSERS:
                self._open(keyword)
            else:
                self._close(keyword)
            if keyword == "case":
                self.blocks[-1].in_pattern = True
            elif keyword in ("for", "select") and at < len(words) and (name := words[at].plain):
                self.scope.forget(name, f"the loop over {name}")
            if keyword in ("for", "select", "case"):
                return []
        return list(words[at:])

    def _open(self, opener: str) -> None:
        is_function = self.function != "" and opener in "{("
        is_branch = opener != "{" or is_function or self.is_behind
        block = _OpenBlock(CLOSERS[opener], is_branch or self._in_branch())
        if is_function:
            scope, self.function = self.scope, ""
            block.caller = (scope.caller, scope.arguments, scope.num_shifted)
            scope.caller, scope.arguments, scope.num_shifted = "the function", None, 0
        if opener == "(":
            self.scope.enter_subshell()
        self.blocks.append(block)

    def _close(self, closer: str) -> None:
        if not self.blocks or self.blocks[-1].closer != closer:
            return
        block = self.blocks.pop()
        if block.caller:
            self.scope.caller, self.scope.arguments, self.scope.num_shifted = block.caller
        if closer == ")":
            self.scope.leave_subshell()

    def _in_branch(self) -> bool:
        return bool(self.blocks) and self.blocks[-1].is_branch

    # --- commands

    def _command(self, words: list[ShellWord], piped: bool) -> None:
        if words[0].plain in DECLARERS:
            self._declare(words)
            return
        number = next((place for place, word in enumerate(words) if not assigned_name(word)), len(words))
        passed = self.scope.expand(words[number:])
        if passed:  # what is assigned before a command is for that command alone
            self.script.commands.append(ShellCommand(passed, words[0].line, piped))
            self._builtin([value.text for value in passed], passed)
            return
        for word in words[:number]:
            self._assign(word, self._values(word))

    def _declare(self, words: Sequence[ShellWord]) -> None:
        """All values are read before the first name gets its own, unlike those of plain assignments."""
        command, options, todo = words[0].plain, set[str](), list[tuple[ShellWord, list[ShellValue]]]()
        for word in words[1:]:
            if (word.plain or "").startswith(("-", "+")):
                options |= set(word.plain or "")
                continue
            name = assigned_name(word, quoted=True)
            if name and options & set(CHANGING):
                self.scope.forget(name, f"{command} -{''.join(sorted(options - {'-'}))} {name}")
            elif name:
                todo.append((word, self._values(word)))
            name = name or word.plain
            if name and NAME.fullmatch(name) and "n" not in options and (command == "export" or "x" in options):
                self.script.exported.append(name)
        for word, values in todo:
            self._assign(word, values)

    def _values(self, word: ShellWord) -> list[ShellValue]:
        """What stands behind the `=` of an assignment."""
        first, last = word.parts[0], word.parts[-1]
        assert isinstance(first, LiteralPart)
        if isinstance(last, ArrayPart):
            return self.scope.expand(last.words)
        _, _, text = first.text.partition("=")
        return [self.scope.joined(ShellWord((replace(first, text=text), *word.parts[1:]), word.line))]

    def _assign(self, word: ShellWord, values: list[ShellValue]) -> None:
        first, last = word.parts[0], word.parts[-1]
        assert isinstance(first, LiteralPart)
        match = ASSIGNMENT.match(first.text)
        if match is None:
            name = first.text.partition("[")[0]
            self.scope.forget(name, word.plain or f"{name}[...]=...")
            return
        name, appends, is_array = match[1], bool(match[2]), isinstance(last, ArrayPart)
        if isinstance(last, ArrayPart) and any(starts_with_bracket(item) for item in last.words):
            self.scope.forget(name, f"{name}=([...]=...)")
        elif appends and not is_array:
            before = self.scope.values.get(name, [])
            joined = self.scope.join([*before[:1], *values], word.line)
            self.scope.assign(name, [joined, *before[1:]], word.line)
        else:
            self.scope.assign(name, values, word.line, appends)

    def _builtin(self, texts: Sequence[str], words: Sequence[ShellValue]) -> None:
        """Commands of the shell itself that set variables."""
        command, *rest = texts
        if command == "let":
            self._calculate(" ".join(rest), " ".join(texts))
        elif command in SETTERS or texts[:2] == ["printf", "-v"]:
            names = rest[1:2] if command == "printf" else rest
            for name in [*filter(NAME.fullmatch, names), *(["OPTARG"] if command == "getopts" else [])]:
                self.scope.forget(name, f"{command} {name}")
        elif command == "unset":
            for text in rest:
                self._unset(text)
        elif command == "set" and "--" in rest:
            self.scope.arguments, self.scope.num_shifted = list(words[texts.index("--") + 1 :]), 0
        elif command == "shift" and not self.scope.in_branch:
            self.scope.num_shifted += int(rest[0]) if rest and re.fullmatch("[0-9]{1,4}", rest[0]) else 1

    def _calculate(self, expression: str, written: str) -> None:
        for name in assigned_names(expression):
            self.scope.forget(name, written)

    def _unset(self, text: str) -> None:
        if match := ELEMENT.match(text):
            self.scope.forget(match[1], f"unset {text}")
        elif self.scope.in_branch and text in self.scope.values:
            self.scope.forget(text, f"unset {text}")
        else:
            self.scope.set(text, None)


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
