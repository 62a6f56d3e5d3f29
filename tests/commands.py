"""The command line in processes of its own: own pid, own signals, own exit code.

They are forked from a process that has imported torch and transformers (`forked_pythons.py`). Limits on time are those
of a machine that has nothing else to do; `deadlines.py` multiplies them.
"""

import contextlib
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from deadlines import within
from forked_pythons import FORKED, ForkedProcess, forking_python, start_server

TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Finished:
    code: int
    """Minus the signal's number, where that ended it."""
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]


class Command:
    """`corral ...`, running."""

    def __init__(self, process: ForkedProcess, stdout: Path, stderr: Path) -> None:
        self.process, self.stdout, self.stderr = process, stdout, stderr

    def send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def is_running(self) -> bool:
        return self.process.is_alive()

    def wait_until(self, condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
        """Until it holds, or the command has ended."""
        timeout_s = within(timeout_s)
        deadline = time.monotonic() + timeout_s
        while self.is_running() and not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain\n{self.stderr.read_text()}"
            time.sleep(0.002)

    def wait(self, timeout_s: float = TIMEOUT_S) -> Finished:
        timeout_s = within(timeout_s)
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"still running after {timeout_s:g} s\n{self.stdout.read_text()}")
        return Finished(self.process.exitcode, self.stdout.read_text(), self.stderr.read_text())


def start_corral(folder: Path, *arguments: str, before: Callable[[], None] | None = None) -> Command:
    """`corral ARGUMENTS` in `folder`. `before`: a function of a module, called in the process first."""
    start_server()
    number = next(n for n in count(1) if not (folder / f"stdout.{n}").exists())
    stdout, stderr = folder / f"stdout.{number}", folder / f"stderr.{number}"
    program = f"{FORKED}\nfrom commands import run_command\nrun_command({pickle.dumps(before)!r})"
    with open(os.devnull) as nothing, stdout.open("w") as out, stderr.open("w") as err:
        process = ForkedProcess(
            str(Path(forking_python()).with_name("socket")),
            ["-c", program, *arguments],
            [nothing.fileno(), out.fileno(), err.fileno()],
            folder=str(folder),
            path=sys.path,
            is_command=True,
        )
    RUNNING[:] = [*(one for one in RUNNING if one.is_alive()), process]
    return Command(process, stdout, stderr)


RUNNING: list[ForkedProcess] = []
"""A process ends when nobody has its object any more."""


def corral(folder: Path, *arguments: str, before: Callable[[], None] | None = None) -> Finished:
    return start_corral(folder, *arguments, before=before).wait()


def run_command(before: bytes) -> None:
    sys.argv[0] = "corral"
    if (function := pickle.loads(before)) is not None:
        function()
    from corral.cli.main import main

    main()
