"""Random shell scripts in the shapes of training scripts. Each ends, and runs nothing but `train`."""

import random
from collections.abc import Callable

NAMES = ("LR", "MODEL", "BATCH", "MODE", "DEVICE", "ARGS", "N_GPUS", "TP", "PATH_A", "EXTRA")
ARRAYS = ("DATA", "ACTOR", "OPTS")
TEXTS = (
    "1e-6",
    "8",
    "512",
    "0",
    "grpo",
    "gpu",
    "npu",
    "",
    "a b",
    "Qwen/Qwen3-8B",
    "/x/y/z.tar.gz",
    "True",
    "x=1",
    "gsm8k",
)
PATTERNS = ("gpu", "npu", "g*", "*p*", "?pu", "[0-9]*", "grpo|gspo", '"a b"', "8|16", "*")


class RandomScript:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.depth, self.num_functions, self.num_counters = 0, 0, 0
        self.functions: list[str] = []
        self.has_trained = False

    def text(self) -> str:
        lines = [self.random.choice(("set -x", "set -xeuo pipefail", "set -e", "#!/usr/bin/env bash", ""))]
        if "u" in lines[0]:  # an unset name would end the script there
            lines += [f"{name}=${{{name}:-{self._word()}}}" for name in NAMES] + [f"{name}=()" for name in ARRAYS]
        lines += [self._statement() for _ in range(self.random.randint(2, 10))]
        lines += [self._train()]
        return "\n".join(lines) + self.random.choice(("\n", "", " \\\n"))

    def _pick(self, *makers: Callable[[], str]) -> str:
        return self.random.choice(makers)()

    def _name(self) -> str:
        return self.random.choice(NAMES)

    # --- words

    def _word(self) -> str:
        """A text that needs no quotes."""
        return self.random.choice([text for text in TEXTS if text and " " not in text])

    def _quoted(self) -> str:
        text = self.random.choice(TEXTS)
        return self.random.choice((f"'{text}'", f'"{text}"', f'"{text}${{{self._name()}}}"'))

    def _value(self) -> str:
        return self._pick(
            self._word,
            self._word,
            self._quoted,
            lambda: f"${{{self._name()}:-{self._word()}}}",
            lambda: f'${{{self._name()}:-"{self.random.choice(TEXTS)}"}}',
            lambda: f"${{{self._name()}:-}}",
            lambda: f'"${{{self._name()}}}-${self._name()}"',
            lambda: f"${self._name()}",
            self._sum,
            self._affix,
            self._command,
        )

    def _sum(self) -> str:
        left, right = (self.random.choice(("4", "10", "2", "N", "0x10")) for _ in range(2))
        sign = self.random.choice(("+", "*", "-", "/ 2 +", "% 3 +", "<", "==", "&&", "||", "<<", "? 3 :"))
        return f"$(( {left.replace('N', '3')} {sign} {right.replace('N', '7')} ))"

    def _affix(self) -> str:
        sign = self.random.choice(
            ("##*/", "#*/", "%.*", "%%.*", "%/*", "//a/b", "/x/_", "^^", ",,", "#?", "%[a-z]", "^")
        )
        return f'"${{{self._name()}{sign}}}"'

    def _command(self) -> str:
        return self._pick(
            lambda: f"$(echo {self._word()})",
            lambda: f'$(basename "${{{self._name()}:-/a/b}}")',
            lambda: f'$(dirname "{self._word()}")',
            lambda: f"$(printf '%s' {self._word()})",
            lambda: '$(cd "$(dirname "$0")" && pwd)',
            lambda: "$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)",
            lambda: f'$([ "${self._name()}" = {self._word()} ] && echo yes || echo no)',
            lambda: f"`echo {self._word()}`",
        )

    def _argument(self) -> str:
        return self._pick(
            lambda: f"{self._key()}={self._value()}",
            lambda: f"{self._key()}={self._value()}",
            lambda: f'"${{{self.random.choice(ARRAYS)}[@]}}"',
            lambda: f"${{{self._name()}:+{self._key()}={self._word()}}}",
            lambda: f"+{self._key()}={{{self._word()},{self._word()}}}",
            lambda: f"{self._key()}=[1,2,{{3..5}}]",
            lambda: f"${self._name()}",
            lambda: '"$@"',
            lambda: f'{self._key()}=\'["console","wandb"]\'',
            lambda: f'{self._key()}="${{{self.random.choice(ARRAYS)}[*]}}"',
            lambda: f"{self._key()}=${{#{self.random.choice(ARRAYS)}[@]}}",
            lambda: f"{self._key()}=~/data",
        )

    def _key(self) -> str:
        return self.random.choice(
            ("data.train_batch_size", "actor.optim.lr", "trainer.nnodes", "algorithm.adv", "x.y_z")
        )

    # --- conditions

    def _condition(self) -> str:
        name, text = self._name(), self.random.choice(TEXTS)
        return self._pick(
            lambda: f'[ "${{{name}:-}}" = "{text}" ]',
            lambda: f'[ "${{{name}:-}}" != {self._word()} ]',
            lambda: f'[ -z "${{{name}:-}}" ]',
            lambda: f'[ -n "${{{name}:-}}" ]',
            lambda: f'[[ "${{{name}:-}}" == {self.random.choice(PATTERNS).partition("|")[0]} ]]',
            lambda: f'[[ ${{{name}:-}} != "{text}" && -n "${{{self._name()}:-}}" ]]',
            lambda: f'[[ ! ( -z ${{{name}:-}} || "{text}" = 8 ) ]]',
            lambda: f"[ ${{#{self.random.choice(ARRAYS)}[@]}} -gt {self.random.randint(0, 2)} ]",
            lambda: f"[[ {self.random.randint(0, 9)} -{self.random.choice(('lt', 'ge', 'eq', 'ne'))} 4 ]]",
            lambda: f"(( {self.random.randint(0, 9)} {self.random.choice(('<', '>=', '%'))} 3 ))",
            lambda: f'[[ "${{{name}:-}}" =~ ^[a-z]+(_|$) ]]',
            lambda: f'! [ "${{{name}:-}}" == "{text}" ]',
            lambda: f'{{ [ "${{{name}:-}}" = gpu ] || [ -n "{text}" ]; }}',
            lambda: f'test "${{{name}:-}}" -gt 5',
            lambda: "true",
            lambda: "false",
        )

    def _conditions(self) -> str:
        sign = self.random.choice((" && ", " || "))
        return sign.join(self._condition() for _ in range(self.random.choice((1, 1, 1, 2))))

    # --- statements

    def _statement(self) -> str:
        simple = (self._assign, self._assign, self._assign, self._array, self._append, self._train_later, self._other)
        if self.depth >= 3:
            return self._pick(*simple)
        self.depth += 1
        made = self._pick(
            *simple, self._if, self._if, self._case, self._for, self._while, self._define, self._call, self._and_or,
            self._group, self._heredoc,
        )  # fmt: skip
        self.depth -= 1
        return made

    def _body(self) -> str:
        return "\n".join(f"    {self._statement()}" for _ in range(self.random.randint(1, 3)))

    def _assign(self) -> str:
        name = self._name()
        return self._pick(
            lambda: f"{name}={self._value()}",
            lambda: f"{name}=${{{name}:-{self._word()}}}",
            lambda: f"export {name}={self._value()}",
            lambda: f"{name}+={self._word()}",
            lambda: f": ${{{name}:={self._word()}}}",
            lambda: f"{name}={self._value()} {self._name()}={self._value()}",
        )

    def _array(self) -> str:
        items = "\n    ".join(self._argument() for _ in range(self.random.randint(0, 4)))
        return f"{self.random.choice(ARRAYS)}=(\n    {items}  # why\n)"

    def _append(self) -> str:
        return f"{self.random.choice(ARRAYS)}+=({self._argument()})"

    def _other(self) -> str:
        return self._pick(
            lambda: f'echo "using ${self._name()}" >&2',
            lambda: f"unset {self.random.choice(('UNUSED', 'OTHER'))}",
            lambda: ": # a comment with 'one quote",
            lambda: 'mkdir -p "$PWD/logs" 2>/dev/null',
            lambda: f'set -- {self._word()} "a b"; shift',
            lambda: f"let 'K = {self.random.randint(1, 9)} + 1'; {self._name()}=$K",
            lambda: f"eval \"{self._name()}='{self._word()}'\"",
        )

    def _train_later(self) -> str:
        return self._train() if self.random.random() < 0.2 else self._assign()

    def _train(self) -> str:
        words = " \\\n    ".join(["train", *(self._argument() for _ in range(self.random.randint(1, 6)))])
        return words + self.random.choice(("", "", " 2>&1 | tee log.txt", " > log 2>&1", " # x=2"))

    def _if(self) -> str:
        text = f"if {self._conditions()}; then\n{self._body()}\n"
        if self.random.random() < 0.3:
            text += f"elif {self._conditions()}; then\n{self._body()}\n"
        if self.random.random() < 0.6:
            text += f"else\n{self._body()}\n"
        return text + "fi"

    def _case(self) -> str:
        branches = "".join(
            f"    {self.random.choice(('', '('))}{self.random.choice(PATTERNS)})\n{self._body()}\n        ;;\n"
            for _ in range(self.random.randint(1, 4))
        )
        return f'case "${{{self._name()}:-}}" in\n{branches}esac'

    def _for(self) -> str:
        words = self._pick(
            lambda: " ".join(self._word() for _ in range(self.random.randint(0, 3))),
            lambda: "{1..3}",
            lambda: "a{b,c}",
            lambda: f'"${{{self.random.choice(ARRAYS)}[@]}}"',
            lambda: f"${self._name()}",
            lambda: "$(seq 1 2)",
        )
        end = self.random.choice(("", "", "    break\n", f"    {self._condition()} && continue\n    true\n"))
        return f"for {self._name()} in {words}; do\n{self._body()}\n{end}done"

    def _while(self) -> str:
        self.num_counters += 1
        i = f"i{self.num_counters}"
        return self._pick(
            lambda: (
                f"{i}=0\nwhile [ ${i} -lt {self.random.randint(0, 3)} ]; do\n{self._body()}\n    {i}=$(({i} + 1))\ndone"
            ),
            lambda: f"for (({i} = 0; {i} < {self.random.randint(0, 3)}; {i}++)); do\n{self._body()}\ndone",
            lambda: f"{i}=3\nuntil (( {i} <= 0 )); do\n{self._body()}\n    (({i}--)) || true\ndone",
        )

    def _define(self) -> str:
        self.num_functions += 1
        name = f"f{self.num_functions}"
        head = self.random.choice((f"{name}() {{", f"function {name} {{", f"{name} ()\n{{"))
        inner = self._pick(
            lambda: f"    local {self._name()}=$1\n{self._body()}",
            lambda: f'    {self.random.choice(ARRAYS)}+=("$@")\n{self._body()}',
            lambda: f"{self._body()}\n    return 0",
            lambda: f"    local x=${{1:-{self._word()}}} y=$#\n    {self._name()}=$x$y",
            lambda: f"    {self._condition()} && return\n{self._body()}",
        )
        self.functions.append(name)
        return f"{head}\n{inner}\n}}"

    def _call(self) -> str:
        if not self.functions:
            return self._assign()
        return f"{self.functions[-1]} {self._value()} {self._word()} || true"

    def _and_or(self) -> str:
        return f"{self._condition()} {self.random.choice(('&&', '||'))} {{ {self._assign()}; }} || true"

    def _group(self) -> str:
        opening, closing = self.random.choice((("(", ")"), ("{", "}")))
        return f"{opening}\n{self._body()}\n{closing}"

    def _heredoc(self) -> str:
        word = self.random.choice(("EOF", "'EOF'"))
        return f"cat > config.yaml <<{word}\nit's: (\"${self._name()}\nEOF"
