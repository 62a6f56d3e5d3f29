"""Programs in the sandbox: right ones pass, wrong ones fail, hostile ones are contained.

A hostile program tries something and prints `open` if that worked, or `contained` if it was stopped. The others do harm
without a word: they must be over at their deadline, and leave nothing behind.
"""

import asyncio
import json
import os
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deadlines import within

from corral.data.rows import Row
from corral.recipe.errors import UserError
from corral.recipe.schema import Reward
from corral.rewards import code as code_module
from corral.rewards.code import check_contained, last_program, read_tests
from corral.rewards.reward_function import Score
from corral.rewards.scorer_pool import ScorerPool

code = partial(code_module.code, timeout_s=within(5))
PAIRS = {"inputs": ["1 2\n", "10 -3\n"], "outputs": ["3\n", "7\n"]}
ADDS = "a, b = map(int, input().split())\nprint(a + b)"
SECRET = Path.home() / ".corral-sandbox-secret"
pytestmark = [pytest.mark.xdist_group("code")]  # one after the other: what is left of one is looked for on the machine

try:
    check_contained()
except UserError as error:
    pytestmark.append(pytest.mark.skip(reason=str(error)))

ATTEMPTS = {
    "a connection": "import socket; socket.create_connection(('1.1.1.1', 53), 1)",
    "a socket to the virtual machine's host": "import socket; socket.socket(socket.AF_VSOCK)",
    "loopback": "import socket; socket.socket().bind(('127.0.0.1', 0))",
    "the home folder": f"open({str(SECRET)!r}).read()",
    "a link to the home folder": f"import os; os.symlink({str(SECRET)!r}, 'link'); open('link').read()",
    "a path above the root": f"open('../' * 20 + {str(SECRET)[1:]!r}).read()",
    "the password file": "open('/etc/passwd').read()",
    "the environment of others": "open('/proc/1/environ').read()",
    "variables": "import os; assert set(os.environ) - {'HOME', 'PATH', 'LANG', 'PYTHONHASHSEED', 'LC_CTYPE'}",
    "a file in the root": "open('/owned', 'w')",
    "a file in /usr": "open('/usr/owned', 'w')",
    "a file in Python": "import os; open(os.path.dirname(os.__file__) + '/owned.py', 'w')",
    "chmod of a program": "import os; os.chmod('/usr/bin/env', 0o4777)",
    "chown": "import os; os.chown('program.py', 0, 0)",
    "root": "import os; os.setuid(0)",
    "chroot": "import os; os.chroot('.')",
    "a device": "import os, stat; os.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(8, 0)); open('disk')",
    "a mount": "call('mount', b'none', b'/sandbox', b'tmpfs', 0, None)",
    "namespaces": "call('unshare', 0x10000000)",
    "ptrace": "call('ptrace', 16, 1, 0, 0)",
    "memory of others": "open('/proc/1/mem', 'rb+')",
    "a signal to the parent": "import os, signal; os.kill(os.getppid(), signal.SIGKILL); assert os.getppid() != 1",
    "a signal to everybody outside": "import os; os.kill(os.getppid() + 100, 9)",
    "memory without a limit": "x = bytearray(3 << 30)",
    "memory in a file without a name": "import os; os.memfd_create('hog')",
    "shared memory": "call('shmget', 0, 1 << 30, 0o1600)",
    "a huge file": "f = open('huge', 'wb'); f.write(b'x' * (64 << 20)); f.flush()",
    "many large files": "for n in range(64): open(str(n), 'wb').write(b'x' * (4 << 20))",
    "many open files": "files = [open('/dev/null') for _ in range(200)]",
    "higher limits": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "descriptors of the parent": "import os; [os.fstat(n) for n in range(3, 6)]",
}
SETUP = """
import ctypes, os, signal
def call(name, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    exec(ATTEMPT)
    print("open")
except BaseException as error:
    print("contained")
"""

NUISANCES = {
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(99,)).start()\n"
    "    except RuntimeError: pass",
    "endless output": "while True: print('x' * 10000)",
    "endless errors": "import sys\nwhile True: print('x' * 10000, file=sys.stderr)",
    "sleeping forever": "import time\ntime.sleep(1000)",
    "computing forever": "while True: pass",
    "deaf to signals": "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\ntime.sleep(1000)",
    "a daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
    "        time.sleep(1000)\n    os._exit(0)\nprint(0)",
    "closing the output": "import os, time\nos.close(1)\ntime.sleep(1000)",
    "leaving early": "import os\nos._exit(0)",
    "stopping itself": "import os, signal\nos.kill(0, signal.SIGSTOP)",
    "crashing": "import ctypes\nctypes.string_at(0)",
}


@pytest.fixture
def secret() -> Any:
    SECRET.write_text("for nobody")
    yield
    SECRET.unlink()


def nothing_is_left() -> bool:
    """Whether no process runs anything of a sandbox. The kernel takes a moment to end those that are killed."""
    deadline = time.monotonic() + within(3)
    while num_left() and time.monotonic() < deadline:
        time.sleep(0.02)
    return num_left() == 0


def num_left() -> int:
    """Processes that run something of a sandbox."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            commands.append(path.read_bytes())
        except OSError:
            continue
    return sum(b"/sandbox/program.py" in one or b"/sandbox/runner.py" in one for one in commands)


def test_a_right_program_passes_and_a_wrong_one_does_not() -> None:
    assert code(f"Adding:\n```python\n{ADDS}\n```", PAIRS) == {"score": 1.0, "tests": 2.0, "tests_passed": 2.0}
    assert code(ADDS.replace("+", "*"), PAIRS)["score"] == 0.0
    assert code("a syntax error", PAIRS)["score"] == 0.0
    assert code("", PAIRS)["score"] == 0.0


def test_with_partial_the_score_is_the_fraction_of_tests_that_pass() -> None:
    assert code("input()\nprint(7)", PAIRS, partial=True) == {"score": 0.5, "tests": 2.0, "tests_passed": 1.0}
    asserts = ["assert f(1) == 2", "assert f(2) == 4", "assert f(0) == 1"]
    assert code("def f(x): return x + 1", asserts, partial=True)["tests_passed"] == 2


def test_programs_with_modules_classes_and_large_input_pass() -> None:
    program = "import sys, collections, heapq, math, json, re\nprint(sum(map(int, sys.stdin.read().split())))"
    numbers = list(range(200_000))
    assert code(program, [{"input": "\n".join(map(str, numbers)), "output": str(sum(numbers))}])["score"] == 1.0


def test_assertions_run_after_the_program() -> None:
    tests = "assert add(2, 3) == 5\nassert add('a', 'b') == 'ab'"
    assert code("def add(a, b):\n    return a + b", tests)["score"] == 1.0
    assert code("def add(a, b):\n    return a - b", tests)["score"] == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "import sys; sys.exit = lambda *_: None; sys.excepthook = lambda *_: None",
        "import builtins; builtins.AssertionError = int; builtins.compile = lambda *a: None",
        "import builtins; builtins.exec = lambda *a: None",
        "import os; os.write = lambda *a: 0; os._exit = lambda code: None",
        "import sys; print(sys.stdin.read())",
        "open('tests.py').read()",
        "import os; os.write(1, b'ready')",
        "import atexit, os; atexit.register(os._exit, 0)",
    ],
)
def test_assertions_are_not_passed_by_a_program_that_leaves_or_changes_their_runner(program: str) -> None:
    assert code(program, "assert add(2, 3) == 5", timeout_s=2)["score"] == 0.0


@pytest.mark.parametrize("name", ATTEMPTS)
def test_an_attempt_is_contained(name: str, secret: None) -> None:
    program = f"ATTEMPT = {ATTEMPTS[name]!r}\n{SETUP}"
    assert code(program, [{"input": "", "output": "contained"}])["score"] == 1.0
    assert nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("name", NUISANCES)
def test_a_nuisance_is_over_at_its_deadline_and_leaves_nothing_behind(name: str) -> None:
    started = time.monotonic()
    assert code(NUISANCES[name], [{"input": "1", "output": "2"}], timeout_s=1)["score"] == 0.0
    assert time.monotonic() - started < within(5)
    assert nothing_is_left()
    assert code(ADDS, PAIRS)["score"] == 1.0


def test_a_program_does_not_see_what_is_expected_nor_what_another_left() -> None:
    looks = (
        "import os\nfound = [open(os.path.join(a, f), errors='replace').read() for r in ('/sandbox', '/dev') "
        "for a, _, fs in os.walk(r) for f in fs if f not in ('zero', 'urandom', 'null')]\n"
        "open('left', 'w').write('x')\nprint(len(found), any('92' + '61' in one for one in found))"
    )
    for _ in range(2):
        assert (
            code(looks, [{"input": "", "output": "1 False"}, {"input": "", "output": "9261"}], partial=True)[
                "tests_passed"
            ]
            == 1
        )


def test_where_programs_can_not_be_locked_in_they_are_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = Path(code_module.__file__).with_name("sandbox_init.py").read_text()
    broken = broken.replace("check(libc.unshare(NEW_NAMESPACES", "check(-1 + 0 * libc.getpid(NEW_NAMESPACES")
    (tmp_path / "sandbox_init.py").write_text(broken)
    monkeypatch.setattr(code_module, "__file__", str(tmp_path / "code.py"))
    with pytest.raises(UserError, match=r"can't be locked in on this machine: .*unshare"):
        check_contained()


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user to become")
def test_it_needs_no_root() -> None:
    python = "/usr/bin/python3"
    if not Path(python).exists():
        pytest.skip("no Python outside of a home folder")
    source = Path(code_module.__file__).with_name("sandbox_init.py").read_text()
    limits = {"RLIMIT_NPROC": 16}
    settings = {
        "files": {"program.py": "import os; print(os.getuid(), os.getpid(), sorted(os.listdir('/sandbox')))"},
        "readable": ["/usr", "/bin", "/lib", "/lib64"],
        "disk_bytes": 1 << 20,
        "limits": limits,
        "command": [python, "-I", "-S", "-B", "/sandbox/program.py"],
        "environment": {},
    }
    text = json.dumps(settings)
    done = subprocess.run(
        [python, "-I", "-S", "-c", source, str(len(text)), "2"],
        input=text,
        capture_output=True,
        text=True,
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
        timeout=within(20),
    )
    assert (done.stdout, done.stderr) == ("65534 2 ['program.py']\n", "")


@pytest.mark.slow
def test_the_reward_processes_run_programs() -> None:
    pool = ScorerPool(Reward(name="code", workers=2, timeout_s=within(30)))
    row = Row([], PAIRS, "", {})

    async def score_all() -> list[Score]:
        return await asyncio.gather(*(pool.score(program, row) for program in [ADDS, "print(0)"] * 8))

    try:
        pool.check()
        assert [score.reward for score in asyncio.run(score_all())] == [1.0, 0.0] * 8
    finally:
        pool.close()
    assert nothing_is_left()


def test_the_last_block_of_python_is_the_program() -> None:
    assert last_program("```python\na\n```\nor\n```py\nb\n```\n```text\nc\n```") == "b\n"
    assert last_program("```text\nc\n```") is None
    assert last_program("print(1)") == "print(1)"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, "has no tests"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": [[1]], "outputs": [2], "fn_name": "f"}, "`fn_name` are not supported"),
        ([{"question": 1}], "has no tests"),
    ],
)
def test_a_row_without_tests_is_an_error(answer: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_tests(answer, False)


def test_tests_may_be_json() -> None:
    assert code(ADDS, '{"inputs": ["1 2"], "outputs": ["3"]}')["score"] == 1.0
