"""Shell scripts, read and never run: their commands, with the script's own variables put in.

Knows what training scripts are made of: assignments, arrays, quotes, `${NAME:-default}`, sums, branches, loops over few
words, functions, pipes. What the text decides is decided: variables that the script does not set are not set, and it is
called without arguments. What only running a command would show stays unknown. Where a branch depends on that, the
script is read for each way, and who uses the commands compares them. Warnings about a value go with it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

from corral.migrate.shell_conditions import Condition
from corral.migrate.shell_expansion import (
    MAX_COMPARED,
    NAME,
    ShellScope,
    ShellValue,
    expand_braces,
    first_unknown,
    glob_pattern,
    join,
    joined_path,
    printed_by,
)
from corral.migrate.shell_lexer import (
    ASSIGNMENT,
    ELEMENT,
    ArrayPart,
    CommandPart,
    LiteralPart,
    ShellWord,
    assigned_name,
    broken_continuations,
    starts_with_bracket,
)
from corral.migrate.shell_parser import (
    AndOr,
    ArithmeticNode,
    CaseBranch,
    CaseCommand,
    CommandGroup,
    ForEach,
    FunctionDefinition,
    IfCommand,
    LoopCommand,
    Pipeline,
    ShellNode,
    ShellParser,
    Silenced,
    SimpleCommand,
    TestCommand,
)
from corral.recipe.errors import RecipeError

SBATCH = re.compile(r"^[ \t]*#SBATCH[ \t]+--(nodes|gpus-per-node|cpus-per-task|ntasks-per-node)[= ](\d+)", re.MULTILINE)
OF_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE",),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
}
"""Variables that Slurm sets, by the line of the script that says to what."""
OF_BASH = (
    "RANDOM", "SECONDS", "LINENO", "HOSTNAME", "UID", "EUID", "PPID", "BASHPID", "PATH", "OLDPWD", "BASH_REMATCH",
)  # fmt: skip
"""Variables with a value that only a shell that runs knows."""
DECLARERS = ("export", "declare", "local", "readonly", "typeset")
CHANGING = "inAlu"
"""Options of `declare` with which a value is not what is written: whole numbers, references, tables, small letters."""
SETTERS = ("read", "mapfile", "readarray", "getopts")
SUCCEEDING = (*DECLARERS, *SETTERS[1:3], "cd", "unset", "set", "shift", "trap", "wait", "mkdir", "ulimit", "true", ":")
OTHER_DEVICES = re.compile(r"torch_npu|npu-smi")
"""What a command names that asks for devices which Corral does not know: it fails where there are GPUs."""
LONGEST_SHOWN = 80
MAX_ROUNDS, MAX_COMMANDS, MAX_CALLS, MAX_WAYS = 200, 5000, 20, 60
"""Number of ways through a script that are read."""


@dataclass(frozen=True)
class ShellCommand:
    words: list[ShellValue]
    line: int
    piped: bool
    """Gets what the command before it writes."""

    @property
    def texts(self) -> list[str]:
        return [word.text for word in self.words]


@dataclass(frozen=True)
class OpenQuestion:
    """A condition that the text does not decide, and the answer that was taken."""

    node: ShellNode
    what: str
    answer: bool
    of_arguments: bool
    """Whether arguments would decide it. Without them the script is read as if it had none."""


@dataclass
class ShellScript:
    commands: list[ShellCommand] = field(default_factory=list)
    exported: list[str] = field(default_factory=list)
    broken_lines: list[str] = field(default_factory=list)
    questions: dict[ShellNode, OpenQuestion] = field(default_factory=dict)
    exit_line: int = 0
    """The line at which the script ends itself."""
    other_ways: "list[tuple[OpenQuestion, ShellScript]]" = field(default_factory=list)
    """The script with another answer to one of its questions, and to those that lead there."""


def read_script(text: str, source: str, defined: Mapping[str, str] | None = None, folder: str = ".") -> ShellScript:
    """Raises a RecipeError where quotes or brackets are left open. `defined`: what the user sets; `1` is `$1`.

    `folder` is the one in which the script would be run."""
    known = {"HOME": "~", "PWD": folder, "0": source, "BASH_SOURCE": source}
    for option, number in SBATCH.findall(text):
        known |= dict.fromkeys(OF_SLURM[option], number)
    variables = {name: [ShellValue(f"${name}", unknown=f"${name}")] for name in OF_BASH}
    variables |= {name: [ShellValue(value)] for name, value in {**known, **(defined or {})}.items()}
    tree = ShellParser(text, source).script()
    trees: dict[tuple[str, int], list[ShellNode]] = {}

    def read(decisions: Mapping[ShellNode, bool]) -> ShellScript:
        scope = ShellScope(source, dict(variables), frozenset(defined or ()))
        return _ScriptReader(source, scope, trees, decisions).read(tree)

    first = read({})
    first.broken_lines += broken_continuations(text, source)
    ways: list[tuple[ShellScript, dict[ShellNode, bool]]] = [(first, {})]
    asked = set[ShellNode]()
    for way, decisions in ways:  # grows while it is read
        for node, question in way.questions.items():
            if node in asked or (question.of_arguments and not way.exit_line):
                continue
            asked.add(node)
            if len(ways) > MAX_WAYS:
                raise RecipeError(f"{source}:{node.line}: the script has more than {MAX_WAYS} branches that are open")
            other = {**decisions, node: not question.answer}
            try:
                ways.append((read(other), other))
            except RecipeError:  # a way that does not end, or asks for too much, is none
                continue
            first.other_ways.append((question, ways[-1][0]))
    return first


class _ScriptEnd(Exception):
    """`exit`"""


class _FunctionEnd(Exception):
    """`return`"""


class _LoopEnd(Exception):
    """`break`, and `continue` where `goes_on`; `num_loops` says of how many loops."""

    def __init__(self, num_loops: int, goes_on: bool) -> None:
        self.num_loops, self.goes_on = num_loops, goes_on


class _ScriptReader:
    def __init__(
        self,
        source: str,
        scope: ShellScope,
        trees: dict[tuple[str, int], list[ShellNode]],
        decisions: Mapping[ShellNode, bool],
    ) -> None:
        self.source, self.scope, self.trees, self.decisions = source, scope, trees, decisions
        self.script = ShellScript()
        self.functions: dict[str, ShellNode] = {}
        self.locals: list[dict[str, list[ShellValue] | None]] = []
        """What local names stood for outside, for each function that is called."""
        self.status: bool | None = True
        """Whether the last command succeeded. None: only running it would show."""
        self.asks: tuple[ShellNode, str] | None = None
        """The command that the status is from."""
        self.output: list[ShellValue] | None = None
        """What was printed, inside `$(...)`."""
        self.exits_on_failure, self.is_checked, self.num_conditions = False, False, 0
        """`set -e`; whether it does not count for the last command, and in how many conditions that is."""
        self.piped, self.num_commands = False, 0
        scope.substitute = self._substitute

    def read(self, nodes: Sequence[ShellNode]) -> ShellScript:
        try:
            self._list(nodes)
        except _ScriptEnd as end:
            self.script.exit_line = end.args[0]
        except (_FunctionEnd, _LoopEnd):
            pass
        return self.script

    # --- lists, branches and loops

    def _list(self, nodes: Sequence[ShellNode]) -> None:
        for node in nodes:
            self.is_checked = False
            self._node(node)
            if self.exits_on_failure and self.status is False and not self.is_checked and not self.num_conditions:
                raise _ScriptEnd(node.line)

    def _node(self, node: ShellNode) -> None:
        NODES[type(node)](self, node)

    def _holds(self, nodes: Sequence[ShellNode]) -> bool:
        """Whether a condition holds; what is open is decided one way, and kept as a question."""
        self.num_conditions += 1
        self._list(nodes)
        self.num_conditions -= 1
        return self._decided()

    def _decided(self) -> bool:
        if self.status is None:
            assert self.asks is not None
            self._ask(self.decisions.get(self.asks[0], True), of_arguments=False)
        assert self.status is not None
        return self.status

    def _ask(self, answer: bool, of_arguments: bool) -> None:
        assert self.asks is not None
        node, what = self.asks
        self.status = self.decisions.get(node, answer)
        self.script.questions.setdefault(node, OpenQuestion(node, what, self.status, of_arguments))

    def _and_or(self, node: AndOr) -> None:
        last = len(node.rest)
        for number, (sign, command) in enumerate([("", node.first), *node.rest]):
            self.is_checked = number < last
            if number == 0 or self._decided() == (sign == "&&"):
                self.num_conditions += number < last
                self._node(command)
                self.num_conditions -= number < last
            else:
                self.is_checked = True

    def _pipeline(self, node: Pipeline) -> None:
        self.num_conditions += node.negated
        if len(node.commands) == 1:
            self._node(node.commands[0])
        else:
            self._pipe(node.commands)
        self.num_conditions -= node.negated
        if node.negated:
            self.status, self.is_checked = not self._decided(), True

    def _pipe(self, commands: Sequence[ShellNode]) -> None:
        piped, output = self.piped, self.output
        for number, command in enumerate(commands):
            self.piped = piped or number > 0
            self.output = output if number == len(commands) - 1 or output is None else []
            with self._subshell():
                self._node(command)
        self.piped, self.output = piped, output

    def _group(self, node: CommandGroup) -> None:
        if not node.is_subshell:
            self._list(node.body)
            return
        with self._subshell():
            self._list(node.body)

    @contextmanager
    def _subshell(self) -> Iterator[None]:
        """Variables are as before behind it, and `exit` ends only it."""
        functions, arguments = dict(self.functions), (self.scope.arguments, self.scope.num_shifted)
        num_conditions = self.num_conditions
        self.scope.enter_subshell()
        try:
            yield
        except (_ScriptEnd, _FunctionEnd, _LoopEnd):
            self.status = self.status if self.status is not None else True
        finally:
            self.scope.leave_subshell()
            self.functions, (self.scope.arguments, self.scope.num_shifted) = functions, arguments
            self.num_conditions = num_conditions

    def _silenced(self, node: Silenced) -> None:
        output, self.output = self.output, None if self.output is None else []
        self._node(node.command)
        self.output = output

    def _if(self, node: IfCommand) -> None:
        for condition, body in node.branches:
            if not condition or self._holds(condition):
                self.status = True
                self._list(body)
                return
        self.status = True

    def _case(self, node: CaseCommand) -> None:
        value, falls_through = self.scope.joined(node.word), False
        for branch in node.branches:
            if falls_through or self._fits(value, branch):
                self.status = True
                self._list(branch.body)
                falls_through = branch.end == ";&"
                if branch.end == ";;":
                    return
        self.status = True

    def _fits(self, value: ShellValue, branch: CaseBranch) -> bool:
        patterns = [glob_pattern(self.scope.patterns(word)) for word in branch.patterns]
        if ".*" in patterns:
            return True
        is_open = value.unknown is not None or None in patterns or len(value.text) > MAX_COMPARED
        self.status = None if is_open else any(re.fullmatch(one or "", value.text, re.DOTALL) for one in patterns)
        self.asks = branch, f"case {value.text} in {' | '.join(word.plain or '...' for word in branch.patterns)}"
        return self._decided()

    def _loop(self, node: LoopCommand) -> None:
        if node.first is not None:
            self._node(node.first)
        for _ in range(MAX_ROUNDS):
            self.num_conditions += 1
            self._list(node.condition)
            self.num_conditions -= 1
            if self.status is None:
                self._open_loop(node.body)
                return
            if self.status is node.until or not self._round(node.body):
                self.status = True
                return
            if node.step is not None:
                self._node(node.step)
        raise RecipeError(f"{self.source}:{node.line}: the loop has more than {MAX_ROUNDS} rounds")

    def _open_loop(self, body: Sequence[ShellNode]) -> None:
        """A loop with any number of rounds: what it sets is not known, in it and behind it."""
        num_commands = len(self.script.commands)
        for is_last in (False, True):
            self.scope.enter_subshell()
            self._round(body)
            for name in self.scope.leave_subshell():
                self.scope.forget(name, f"the loop over {name}")
            if not is_last:
                del self.script.commands[num_commands:]
        self.status = True

    def _for_each(self, node: ForEach) -> None:
        words = self.scope.arguments or [] if node.words is None else self.scope.expand(node.words)
        self.status = True
        if first_unknown(words) is not None or len(words) > MAX_ROUNDS:
            self.scope.forget(node.name, f"the loop over {node.name}")
            self._open_loop(node.body)
            return
        for word in words:
            self.scope.set(node.name, [word])
            if not self._round(node.body):
                return

    def _round(self, body: Sequence[ShellNode]) -> bool:
        """Whether the loop goes on behind it."""
        try:
            self._list(body)
        except _LoopEnd as end:
            if end.num_loops > 1:
                raise _LoopEnd(end.num_loops - 1, end.goes_on) from None
            return end.goes_on
        return True

    def _function(self, node: FunctionDefinition) -> None:
        self.functions[node.name] = node.body
        self.status = True

    # --- commands

    def _arithmetic(self, node: ArithmeticNode) -> None:
        [expression] = node.command.expressions[:1]
        value = self.scope.calculate(expression) if expression.parts else ShellValue("1")
        self.status = None if value.unknown is not None else value.text != "0"
        self.asks = node, f"(({node.command.text}))"

    def _test(self, node: TestCommand) -> None:
        shown = " ".join(one if isinstance(one, str) else self.scope.joined(one).text for one in node.items)
        self._condition(node, node.items, f"[[ {shown} ]]")

    def _condition(self, node: ShellNode, items: Sequence[str | ShellWord | ShellValue], what: str) -> None:
        double = isinstance(node, TestCommand)
        self.scope.asked_arguments = self.scope.asked_arguments and not double
        self.status, self.asks = Condition(self.scope, items, double).result(), (node, what)
        if self.scope.asked_arguments and self.status is not None:
            self._ask(self.status, of_arguments=True)

    def _simple(self, node: SimpleCommand) -> None:
        self.num_commands += 1
        if self.num_commands > MAX_COMMANDS:
            raise RecipeError(f"{self.source}:{node.line}: the script runs more than {MAX_COMMANDS} commands")
        words = node.words
        self.status, self.asks = True, (node, " ".join(word.plain or "..." for word in words)[:LONGEST_SHOWN])
        if words and words[0].plain in DECLARERS:
            self._declare(words)
            return
        number = next((place for place, word in enumerate(words) if not assigned_name(word)), len(words))
        self.scope.asked_arguments = False
        passed = self.scope.expand(words[number:])
        if not passed:
            for word in words[:number]:
                self._assign(word, self._values(word))
            return
        self.asks = node, " ".join(value.text for value in passed)[:LONGEST_SHOWN]
        self._run(passed, node)  # what is assigned before a command is for that command alone

    def _run(self, words: list[ShellValue], node: ShellNode) -> None:
        command, *rest = texts = [word.text for word in words]
        if command in self.functions:
            self._call(self.functions[command], words[1:])
            return
        if self.output is None:
            self.script.commands.append(ShellCommand(words, node.line, self.piped))
        self.status = True if command in SUCCEEDING else None
        if command in ("[", "test"):
            self._condition(node, words[1 : -1 if command == "[" else None], " ".join(texts))
        elif command in BUILTINS:
            BUILTINS[command](self, rest, words[1:])
        elif (printed := printed_by(texts, self.scope)) is not None:
            self.status = command != "false"
            if self.output is not None:
                left_out = (f"{self.source}:{node.line}: what `date` prints is left out",) * (command == "date")
                values = [*words, *self.scope.values["PWD"][:1], ShellValue("", warnings=left_out)]
                self.output.append(replace(join(values, node.line), text=printed))
        elif any(map(OTHER_DEVICES.search, texts)):
            self.status = False
        elif self.output is not None:
            self.output.append(ShellValue(" ".join(texts), unknown=self.asks[1] if self.asks else command))

    def _call(self, body: ShellNode, arguments: list[ShellValue]) -> None:
        scope = self.scope
        if len(self.locals) >= MAX_CALLS:
            raise RecipeError(f"{self.source}:{body.line}: functions call each other more than {MAX_CALLS} times")
        before = scope.caller, scope.arguments, scope.num_shifted, self.num_conditions
        scope.caller, scope.arguments, scope.num_shifted = "the function", arguments, 0
        self.locals.append({})
        try:
            self._node(body)
        except _FunctionEnd:
            pass
        finally:
            for name, values in self.locals.pop().items():
                scope.set(name, values)
            scope.caller, scope.arguments, scope.num_shifted, self.num_conditions = before

    def _substitute(self, part: CommandPart) -> ShellValue:
        """What the command in `$(...)` prints, where the text says it."""
        output, piped, self.output, self.piped = self.output, self.piped, [], False
        try:
            with self._subshell():
                self._list(self._parsed(part.text, part.line))
            value = join([*self.output, ShellValue("")], part.line)
        finally:
            self.output, self.piped = output, piped
        if value.unknown is not None:
            return replace(value, text=f"$({part.text})", unknown=part.text.strip())
        return replace(value, text=value.text.rstrip("\n"))

    def _parsed(self, text: str, line: int) -> list[ShellNode]:
        """The same text in the same line is the same tree, since decisions are kept by node."""
        if (text, line) not in self.trees:
            self.trees[text, line] = ShellParser(text, self.source, line).script()
        return self.trees[text, line]

    # --- commands of the shell itself

    def _declare(self, words: Sequence[ShellWord]) -> None:
        """All values are read before the first name gets its own, unlike those of plain assignments."""
        command, options, todo = words[0].plain, set[str](), list[tuple[ShellWord, list[ShellValue]]]()
        for word in chain.from_iterable(map(expand_braces, words[1:])):
            if (word.plain or "").startswith(("-", "+")):
                options |= set(word.plain or "")
                continue
            name = assigned_name(word, quoted=True) or word.plain
            if not name or not NAME.fullmatch(name):
                continue
            if self.locals and command in ("local", "declare", "typeset") and "g" not in options:
                self.locals[-1].setdefault(name, self.scope.values.get(name))
                if not assigned_name(word, quoted=True):
                    self.scope.set(name, None)
            if options & set(CHANGING):
                self.scope.forget(name, f"{command} -{''.join(sorted(options - {'-'}))} {name}")
            elif assigned_name(word, quoted=True):
                todo.append((word, self._values(word)))
            if "n" not in options and (command == "export" or "x" in options):
                self.script.exported.append(name)
        for word, values in todo:
            self._assign(word, values)
        self.status = True

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
            self.scope.set(name, [self.scope.join([*before[:1], *values], word.line), *before[1:]])
        elif appends:
            self.scope.extend(name, values)
        else:
            self.scope.set(name, values)

    def _change_folder(self, texts: Sequence[str], words: Sequence[ShellValue]) -> None:
        [folder] = [word for word in words if not word.text.startswith("-")][-1:] or [ShellValue("~")]
        [here] = self.scope.values["PWD"][:1]
        self.scope.set("PWD", [replace(join([here, folder], 0), text=joined_path(here.text, folder.text))])

    def _evaluate(self, texts: Sequence[str], words: Sequence[ShellValue]) -> None:
        if first_unknown(words) is None:
            self.script.commands.pop()
            self._list(self._parsed(" ".join(texts), self.asks[0].line if self.asks else 0))

    def _execute(self, texts: Sequence[str], words: Sequence[ShellValue]) -> None:
        if words:
            raise _ScriptEnd(self.asks[0].line if self.asks else 0)

    def _end(self, texts: Sequence[str], words: Sequence[ShellValue], kind: type[Exception]) -> None:
        self.status = not texts or texts[0] == "0"
        raise kind(self.asks[0].line if self.asks else 0)

    def _end_loop(self, texts: Sequence[str], words: Sequence[ShellValue], goes_on: bool) -> None:
        raise _LoopEnd(int(texts[0]) if texts and texts[0].isdigit() else 1, goes_on)

    def _let(self, texts: Sequence[str], words: Sequence[ShellValue]) -> None:
        for text in texts:
            value = self.scope.calculate(ShellWord((LiteralPart(text, quoted=True),), 0))
            self.status = None if value.unknown is not None else value.text != "0"

    def _read(self, texts: Sequence[str], words: Sequence[ShellValue]) -> None:
        for name in [*filter(NAME.fullmatch, texts), "OPTARG", "REPLY"]:
            self.scope.forget(name, f"{self.asks[1].split()[0]} {name}" if self.asks else name)

    def _unset(self, texts: Sequence[str], words: Sequence[ShellValue]) -> None:
        for text in texts:
            if match := ELEMENT.match(text):
                self.scope.forget(match[1], f"unset {text}")
            else:
                self.scope.set(text, None)

    def _set(self, texts: Sequence[str], words: Sequence[ShellValue]) -> None:
        if "--" in texts:
            self.scope.arguments, self.scope.num_shifted = list(words[texts.index("--") + 1 :]), 0
        for text, behind in zip(texts, [*texts[1:], ""], strict=True):
            if re.fullmatch("[-+][a-zA-Z]+", text) and ("e" in text or ("o" in text and behind == "errexit")):
                self.exits_on_failure = text[0] == "-"

    def _shift(self, texts: Sequence[str], words: Sequence[ShellValue]) -> None:
        self.scope.num_shifted += int(texts[0]) if texts and re.fullmatch("[0-9]{1,4}", texts[0]) else 1


NODES: dict[type[ShellNode], Callable[[_ScriptReader, Any], None]] = {
    AndOr: _ScriptReader._and_or,
    ArithmeticNode: _ScriptReader._arithmetic,
    CaseCommand: _ScriptReader._case,
    ForEach: _ScriptReader._for_each,
    FunctionDefinition: _ScriptReader._function,
    CommandGroup: _ScriptReader._group,
    IfCommand: _ScriptReader._if,
    LoopCommand: _ScriptReader._loop,
    Pipeline: _ScriptReader._pipeline,
    Silenced: _ScriptReader._silenced,
    SimpleCommand: _ScriptReader._simple,
    TestCommand: _ScriptReader._test,
}
BUILTINS: dict[str, Callable[[_ScriptReader, Sequence[str], Sequence[ShellValue]], None]] = {
    "cd": _ScriptReader._change_folder,
    "eval": _ScriptReader._evaluate,
    "exec": _ScriptReader._execute,
    "exit": partial(_ScriptReader._end, kind=_ScriptEnd),
    "return": partial(_ScriptReader._end, kind=_FunctionEnd),
    "break": partial(_ScriptReader._end_loop, goes_on=False),
    "continue": partial(_ScriptReader._end_loop, goes_on=True),
    "let": _ScriptReader._let,
    **dict.fromkeys(SETTERS, _ScriptReader._read),
    "unset": _ScriptReader._unset,
    "set": _ScriptReader._set,
    "shift": _ScriptReader._shift,
}
