"""The process that knows how a worker ended, with real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from corral.runtime import exits


def begin(folder: Path, program: str) -> "subprocess.Popen[str]":
    shim = [sys.executable, "-I", "-S", exits.__file__, str(folder), sys.executable, "-c", program]
    return subprocess.Popen(shim, stdout=subprocess.PIPE, text=True)


def run(folder: Path, program: str) -> int | None:
    """The exit code as it was written down."""
    process = begin(folder, f"import os, signal, sys; print(os.getpid(), flush=True); {program}")
    output, _ = process.communicate(timeout=30)
    return exits.read_exit(folder, int(output))


@pytest.mark.parametrize(
    ("program", "code"),
    [("pass", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", -9), ("os.kill(os.getpid(), signal.SIGSEGV)", -11)],
)
def test_the_exit_code_is_written_down(tmp_path: Path, program: str, code: int) -> None:
    assert run(tmp_path, program) == code


def test_a_process_that_still_runs_has_none(tmp_path: Path) -> None:
    assert exits.read_exit(tmp_path, os.getpid()) is None


def test_a_signal_is_passed_on_and_the_outcome_still_known(tmp_path: Path) -> None:
    process = begin(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.terminate()
    process.wait(timeout=30)
    assert exits.read_exit(tmp_path, pid) == -signal.SIGTERM


def test_the_worker_ends_with_its_parent(tmp_path: Path) -> None:
    process = begin(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait(timeout=30)
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """A process that has ended may still be listed, if nobody waits for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_endings_are_put_in_words() -> None:
    assert exits.describe_exit(-9).startswith("was killed by signal 9 (SIGKILL; often out of memory")
    assert exits.describe_exit(-15) == "was killed by signal 15 (SIGTERM)"
    assert exits.describe_exit(1) == "ended with exit code 1"
