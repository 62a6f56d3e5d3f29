"""The `code` reward: runs the program in a response against the row's tests, locked in (`sandbox_init.py`).

Tests are pairs of standard input and output, or Python code with assertions. Of pairs the program never sees the
expected output: it is compared here. Assertions run in the interpreter of the program, after it; that they have all
passed is reported with a token that comes with them.
"""

import contextlib
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from corral.child_process import command_dying_with_parent, signal_group, start_child
from corral.recipe.errors import UserError
from corral.rewards.reward_function import built_in

READABLE = ("/usr", "/bin", "/lib", "/lib64", "/etc/alternatives")
"""Folders of the system that programs see, besides the Python installation."""
NEEDED = (
    "needs user namespaces without privileges (sysctl kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu, "
    "user.max_user_namespaces above 0; in a container, seccomp and AppArmor profiles that allow unshare and mount), or "
    "root"
)
BLOCK = re.compile(r"```[ \t]*([A-Za-z0-9_+-]*)[^\n]*\n(.*?)```", re.DOTALL)
RUNNER = """\
import os

def main():
    # In variables of a function, where a program that changes modules does not reach them.
    run, build, write, read, leave = exec, compile, os.write, os.read, os._exit
    down, up, null = os.dup(0), os.dup(1), os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0), os.dup2(null, 1)
    names = {"__name__": "program"}
    run(build(open("program.py").read(), "program.py", "exec"), names)
    write(up, b"ready")
    text = b""
    while chunk := read(down, 65536):
        text += chunk
    token, _, tests = text.partition(b"\\n")
    run(build(tests, "tests.py", "exec"), names)
    write(up, token)
    leave(0)

main()
"""


class NotContained(Exception):
    """The program was not run, because this machine can't lock it in."""


@dataclass(frozen=True)
class SandboxLimits:
    """What one run of a program may use."""

    wall_s: float
    cpu_s: int
    memory_mb: int
    processes: int
    disk_mb: int
    open_files: int = 64
    output_bytes: int = 1 << 20

    def settings(self) -> dict[str, Any]:
        limits = {
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_AS": self.memory_mb << 20,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_FSIZE": self.disk_mb << 20,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
        }
        return {"limits": limits, "disk_bytes": self.disk_mb << 20}


@built_in(check=lambda **options: check_contained())
def code(
    response: str,
    answer: Any,
    *,
    partial: bool = False,
    timeout_s: float = 5.0,
    memory_mb: int = 1024,
    processes: int = 16,
    disk_mb: int = 16,
) -> dict[str, float]:
    """1 if the program in the response passes all of the row's tests, else 0; with `partial`, the fraction that it
    passes. `timeout_s`, `memory_mb`, `processes` and `disk_mb` bound each test. Its metrics are `tests` and
    `tests_passed`."""
    limits = SandboxLimits(timeout_s, int(timeout_s) + 1, memory_mb, processes, disk_mb)
    tests, program = read_tests(answer, partial), last_program(response)
    num_passed = 0
    for test in tests if program is not None else []:
        assert program is not None
        passed = test.passes(program, limits)
        num_passed += passed
        if not passed and not partial:
            break
    score = num_passed / len(tests) if partial else float(num_passed == len(tests))
    return {"score": score, "tests": float(len(tests)), "tests_passed": float(num_passed)}


def last_program(response: str) -> str | None:
    """The last block of Python in the response, or all of it where there is no block."""
    if "```" not in response:
        return response if response.strip() else None
    programs = [
        text for language, text in BLOCK.findall(response) if language.lower() in ("", "py", "python", "python3")
    ]
    return programs[-1] if programs else None


@dataclass(frozen=True)
class PairTest:
    """A standard input, and the standard output that belongs to it."""

    stdin: str
    stdout: str

    def passes(self, program: str, limits: SandboxLimits) -> bool:
        run = SandboxRun({"program.py": program}, "program.py", limits)
        run.finish(self.stdin.encode())
        return run.exit_code == 0 and lines_of(run.output.decode(errors="replace")) == lines_of(self.stdout)


@dataclass(frozen=True)
class AssertionTest:
    """Python code that raises if the program, which ran before it, is wrong."""

    text: str

    def passes(self, program: str, limits: SandboxLimits) -> bool:
        run = SandboxRun({"program.py": program, "runner.py": RUNNER}, "runner.py", limits)
        if not run.wait_for(b"ready"):
            return False
        token = secrets.token_hex(16).encode()
        run.finish(token + b"\n" + self.text.encode())
        return run.exit_code == 0 and run.output == b"ready" + token


def lines_of(text: str) -> list[str]:
    """What is compared: lines without spaces at their ends, and without blank lines at the end of all."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def read_tests(answer: Any, one_by_one: bool) -> Sequence[PairTest | AssertionTest]:
    """The row's tests: `{inputs: [...], outputs: [...]}`, a list of `{input: ..., output: ...}`, a text with
    assertions, or a list of them; also as JSON text. ValueError for anything else."""
    if isinstance(answer, str) and answer.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError):  # Python code may begin with a bracket, too
            answer = json.loads(answer)
    answer = answer.tolist() if hasattr(answer, "tolist") else answer
    if isinstance(answer, Mapping):
        if answer.get("fn_name"):
            raise ValueError("tests that call a function by `fn_name` are not supported; write them as assertions")
        inputs, outputs = list(answer.get("inputs", ())), list(answer.get("outputs", ()))
        if len(inputs) != len(outputs):
            raise ValueError(f"the tests have {len(inputs)} inputs and {len(outputs)} outputs")
        answer = [{"input": one, "output": other} for one, other in zip(inputs, outputs, strict=True)]
    texts: list[Any] = [answer] if isinstance(answer, str) else list(answer or ())
    if texts and all(isinstance(one, Mapping) and {"input", "output"} <= set(one) for one in texts):
        return [PairTest(as_text(one["input"]), as_text(one["output"])) for one in texts]
    if not texts or not all(isinstance(one, str) and one.strip() for one in texts):
        raise ValueError(
            "the row's answer has no tests: it must be `{inputs: [...], outputs: [...]}`, a list of `{input, output}`, "
            "or Python code with assertions"
        )
    return [AssertionTest(one) for one in (texts if one_by_one else ["\n".join(texts)])]


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def start_sandbox(
    settings: Mapping[str, Any], stdout: int, stderr: int | None, descriptors: Sequence[int] = ()
) -> "tuple[subprocess.Popen[bytes], bytes, IO[bytes]]":
    """Starts a program that `sandbox_init.py` locks in. Returns its process, what is to be written to its standard
    input first, and where the reason is read if it could not be locked in. `descriptors`: those that it gets."""
    head = json.dumps({**settings, "descriptors": [*descriptors]}).encode()
    reason, theirs = os.pipe()
    init = [sys.executable, "-I", "-S", str(Path(__file__).with_name("sandbox_init.py")), str(len(head)), str(theirs)]
    process = start_child(
        command_dying_with_parent(init, signal.SIGKILL),
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env={},
        pass_fds=[theirs, *descriptors],
    )
    os.close(theirs)
    return process, head, os.fdopen(reason, "rb")


class SandboxRun:
    """One run of a program, from its start. Output on the standard error is discarded."""

    def __init__(self, files: Mapping[str, str], main: str, limits: SandboxLimits) -> None:
        python = os.path.realpath(sys.executable)
        settings = {
            **limits.settings(),
            "files": files,
            "readable": [*READABLE, *sorted({sys.base_prefix, os.path.realpath(sys.base_prefix)})],
            "command": [python, "-I", "-S", "-B", f"/sandbox/{main}"],
            "environment": {"HOME": "/sandbox", "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
        }
        self.limits, self.output, self.exit_code = limits, b"", -1
        self._deadline = time.monotonic() + limits.wall_s + 1.0  # a second to start
        self._process, self._inbox, self._reason = start_sandbox(settings, subprocess.PIPE, subprocess.DEVNULL)

    def wait_for(self, text: bytes) -> bool:
        """Whether the program writes this first. If not, it is killed."""
        while len(self.output) < len(text) and self._exchange():
            pass
        if self.output != text:
            self._end()
        return self.output == text

    def finish(self, stdin: bytes) -> None:
        """Give it this input, and wait for its end or its deadline."""
        self._inbox += stdin
        while self._exchange(close=True):
            pass
        self._end()

    def _exchange(self, close: bool = False) -> bool:
        """Write and read what can be. False: it has closed its output, its time is over, or it wrote too much."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        stdin, stdout = self._process.stdin, self._process.stdout
        if close and not self._inbox and not stdin.closed:
            stdin.close()
        poll = select.poll()
        poll.register(stdout, select.POLLIN)
        if self._inbox and not stdin.closed:
            os.set_blocking(stdin.fileno(), False)
            poll.register(stdin, select.POLLOUT)
        left_s = self._deadline - time.monotonic()
        events = dict(poll.poll(max(left_s, 0) * 1000))
        if not events:
            return False
        if not stdin.closed and stdin.fileno() in events:
            try:
                self._inbox = self._inbox[os.write(stdin.fileno(), self._inbox) :]
            except BlockingIOError:
                pass
            except OSError:  # it does not read its input
                self._inbox = b""
        if stdout.fileno() in events:
            chunk = os.read(stdout.fileno(), 1 << 16)
            self.output += chunk
            return bool(chunk) and len(self.output) <= self.limits.output_bytes
        return True

    def _end(self) -> None:
        """Wait for it where it ends by itself in time, else kill it. NotContained if it was never run."""
        try:
            self.exit_code = self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.exit_code = -1
        if len(self.output) > self.limits.output_bytes:
            self.exit_code = -1
        signal_group(self._process.pid)  # with the first process of a namespace the kernel kills all of it
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                with contextlib.suppress(OSError):
                    stream.close()
        raise_if_not_contained(self._reason)


def raise_if_not_contained(reason: IO[bytes]) -> None:
    """NotContained, with the reason that `sandbox_init.py` has written, if it has."""
    with reason:
        os.set_blocking(reason.fileno(), False)
        text = reason.read() or b""
    if text:
        raise NotContained(f"the program can't be locked in on this machine: {text.decode(errors='replace')}")


def check_contained() -> None:
    """UserError where programs can't be locked in: they are then not run at all."""
    if sys.platform != "linux":
        raise UserError("programs are locked in with namespaces of Linux, which this system does not have")
    limits = SandboxLimits(wall_s=20, cpu_s=5, memory_mb=1024, processes=16, disk_mb=1)
    try:
        passes = PairTest("1 2", "3").passes("print(sum(map(int, input().split())))", limits)
    except NotContained as error:
        raise UserError(f"{error}. The `code` reward {NEEDED}") from error
    if not passes:
        raise UserError(
            "a program that adds two numbers did not run in the sandbox; is the Python installation readable?"
        )
