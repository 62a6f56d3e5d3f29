"""Child processes: groups that end whole, children that die with their parent, and the shim that records exits."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deadlines import wait_until, within

from corral import child_process


def begin(folder: Path, program: str) -> "subprocess.Popen[str]":
    shim = [sys.executable, "-I", "-S", child_process.__file__, str(folder), "worker", sys.executable, "-c", program]
    return subprocess.Popen(shim, stdout=subprocess.PIPE, text=True, process_group=0)  # as Ray does it


def first_line(process: "subprocess.Popen[Any]") -> Any:
    assert process.stdout is not None
    return process.stdout.readline()


def run(folder: Path, program: str) -> int | None:
    """The exit code as it was written down."""
    begin(folder, f"import os, signal, sys; {program}").communicate(timeout=within(30))
    return child_process.read_exit(folder, "worker")


@pytest.mark.parametrize(
    ("program", "code"),
    [("pass", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", -9), ("os.kill(os.getpid(), signal.SIGSEGV)", -11)],
)
def test_the_exit_code_is_written_down(tmp_path: Path, program: str, code: int) -> None:
    assert run(tmp_path, program) == code


def test_a_process_that_still_runs_has_none(tmp_path: Path) -> None:
    assert child_process.read_exit(tmp_path, "worker") is None


@pytest.mark.parametrize(
    ("number", "send"), [(signal.SIGTERM, os.kill), (signal.SIGKILL, os.killpg)], ids=["to the shim", "to its group"]
)
def test_a_signal_is_passed_on_and_the_outcome_still_known(
    tmp_path: Path, number: signal.Signals, send: Callable[[int, int], None]
) -> None:
    """Also where the whole process group is killed, as Ray does it."""
    process = begin(tmp_path, "import time; print(flush=True); time.sleep(60)")
    first_line(process)
    send(process.pid, number)
    process.wait(timeout=within(30))
    assert child_process.read_exit(tmp_path, "worker") == -number


def test_the_worker_ends_with_its_parent(tmp_path: Path) -> None:
    process = begin(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    pid = int(first_line(process))
    process.kill()
    process.wait(timeout=within(30))
    until_ended(pid)


def until_ended(pid: int) -> None:
    wait_until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    """A process that has ended may still be listed, if nobody waits for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_exits_are_described() -> None:
    assert child_process.describe_exit(-9).startswith("was killed by signal 9 (SIGKILL; often out of memory")
    assert child_process.describe_exit(-15) == "was killed by signal 15 (SIGTERM)"
    assert child_process.describe_exit(1) == "ended with exit code 1"


def test_a_group_is_terminated_with_what_the_child_has_started(tmp_path: Path) -> None:
    program = "import subprocess, sys, time; child = subprocess.Popen(['sleep', '60']); print(child.pid, flush=True)"
    process = child_process.start_child([sys.executable, "-c", program], stdout=subprocess.PIPE)
    grandchild = int(first_line(process))
    assert child_process.terminate_group(process, grace_s=within(10)) in (0, -signal.SIGTERM)
    until_ended(grandchild)


def test_a_child_that_ignores_sigterm_is_killed_after_its_grace() -> None:
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    process = child_process.start_child([sys.executable, "-c", program], stdout=subprocess.PIPE)
    first_line(process)
    assert child_process.terminate_group(process, grace_s=0.1) == -signal.SIGKILL


@pytest.mark.parametrize("kind", ["death_signal", "die_with_stdin"])
def test_a_child_dies_with_its_parent(kind: str) -> None:
    inside = "from corral.child_process import die_with_stdin; die_with_stdin(); " if kind == "die_with_stdin" else ""
    child = f"{inside}import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    options = "stdin=subprocess.PIPE" if kind == "die_with_stdin" else "death_signal=signal.SIGKILL"
    parent = (
        "import signal, subprocess, sys, time; from corral.child_process import start_child; "
        f"start_child([sys.executable, '-c', {child!r}], {options}); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    pid = int(first_line(process))
    process.kill()
    process.wait(timeout=within(30))
    until_ended(pid)


def test_the_state_of_a_process_is_that_of_the_kernel_whatever_its_name(tmp_path: Path) -> None:
    program = tmp_path / "a (b) S 1"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([program, "60"])
    found = child_process.read_stat(process.pid)
    process.kill()
    assert process.wait(within(30)) == -signal.SIGKILL
    assert found is not None
    assert (found.name, found.parent) == (program.name, os.getpid())
    assert child_process.read_stat(process.pid) is None


def test_last_lines_leave_out_blank_ones_and_need_no_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert child_process.last_lines(log, 2) == []
    log.write_bytes(b"one\n\n  two\nthree \xff\n\n")
    assert child_process.last_lines(log, 2) == ["  two", "three \ufffd"]


def test_a_folder_goes_when_the_last_process_that_holds_it_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "held"
    program = (
        "import sys, time; from pathlib import Path; from corral import child_process; folder = Path(sys.argv[1]); "
        "child_process.hold_folder(folder); child_process.remove_when_released(folder); "
        "(folder / 'file').touch(); print(flush=True); time.sleep(60)"
    )
    holders = [
        subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in holders:
        first_line(process)
    holders[0].kill()
    holders[0].wait()
    time.sleep(0.3)
    assert (folder / "file").exists()
    holders[1].kill()
    holders[1].wait()
    wait_until(lambda: not folder.exists())


def test_a_killed_workers_shared_memory_goes_with_the_folder_and_logs_stay(tmp_path: Path) -> None:
    worker = subprocess.Popen(["true"])
    worker.wait()
    folder, log = tmp_path / "held", tmp_path / "held" / "worker.log"
    folder.mkdir()
    (folder / f"heartbeat-{worker.pid}").touch()
    log.touch()
    counts = Path(f"/dev/shm/torch_{worker.pid}_4242_0")
    counts.touch()
    child_process.remove_folder(folder)
    assert not counts.exists()
    assert log.exists()
    log.unlink()
    child_process.remove_folder(folder)
    assert not folder.exists()


def test_a_released_folder_goes_even_if_an_exit_code_is_written_into_it_meanwhile(tmp_path: Path) -> None:
    """As a worker's shim does, which ends a moment later than the worker."""
    folder = tmp_path / "held"
    folder.mkdir()
    program = (
        "import shutil, sys; from pathlib import Path; from corral import child_process; folder = Path(sys.argv[1])\n"
        "def late(path, ignore_errors, remove=shutil.rmtree):\n"
        "    shutil.rmtree = remove\n"
        "    (folder / 'exit-1').write_text('0')  # when the files were listed and the folder is not gone yet\n"
        "shutil.rmtree = late\n"
        "child_process.remove_released_folder(folder)"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)
    wait_until(lambda: not folder.exists())
