"""The command line in processes of its own: own pid, own signals, own exit code.

A process needs seconds to import torch and transformers, and the tests of the loop need dozens of processes. So these
are forked from one that has imported both.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked_pythons

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

    def __init__(self, process: BaseProcess, stdout: Path, stderr: Path) -> None:
        self.process, self.stdout, self.stderr = process, stdout, stderr

    def send(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def is_running(self) -> bool:
        return self.process.is_alive()

    def wait_until(self, condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
        """Until it holds, or the command has ended."""
        deadline = time.monotonic() + timeout_s
        while self.is_running() and not condition():
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain\n{self.stderr.read_text()}"
            time.sleep(0.002)

    def wait(self, timeout_s: float = TIMEOUT_S) -> Finished:
        self.process.join(timeout_s)
        if self.process.exitcode is None:
            self.process.kill()
            raise AssertionError(f"still running after {timeout_s:g} s\n{self.stdout.read_text()}")
        return Finished(self.process.exitcode, self.stdout.read_text(), self.stderr.read_text())


def start_corral(folder: Path, *arguments: str, before: Callable[[], None] | None = None) -> Command:
    """`corral ARGUMENTS` in `folder`. `before`: a function of a module, called in the process first."""
    number = next(n for n in count(1) if not (folder / f"stdout.{n}").exists())
    stdout, stderr = folder / f"stdout.{number}", folder / f"stderr.{number}"
    stdout.touch()
    stderr.touch()
    process = start_forkserver().Process(target=_main, args=(folder, arguments, stdout, stderr, before), daemon=True)
    process.start()
    return Command(process, stdout, stderr)


def corral(folder: Path, *arguments: str, before: Callable[[], None] | None = None) -> Finished:
    return start_corral(folder, *arguments, before=before).wait()


@cache
def start_forkserver() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["command_preload"])
    os.environ["OMP_NUM_THREADS"] = "1"  # threads of a pool that was started before the fork would be missing after it
    workers = forked_pythons.prepare()
    with contextlib.chdir(Path(__file__).parent):  # where it looks for the module
        ensure_running()
    context.Process(target=forked_pythons.serve, args=(workers,), daemon=True).start()
    return context


def _main(
    folder: Path, arguments: tuple[str, ...], stdout: Path, stderr: Path, before: Callable[[], None] | None
) -> None:
    os.chdir(folder)
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    sys.argv = ["corral", *arguments]
    if before is not None:
        before()
    from corral.cli.main import main

    main()
