"""Child processes: start one in a process group of its own, let it die with its parent, end its whole group, and say
how it ended.

The file is also a program, the shim around each worker of a run: Ray only says that an actor died, and the one who
knows how is the process's parent. `python -I -S child_process.py FOLDER NAME COMMAND...` runs the command as its child,
passes signals on, and writes the exit code to `FOLDER/exit-NAME`. With `--remove FOLDER` it removes a folder that no
process holds any more. So this file needs nothing but the standard library.
"""

import ctypes
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

POLL_EVERY_S = 0.02
TAIL_BYTES = 64 * 1024
REMOVE_ATTEMPTS = 50
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HINTS: dict[int, str] = {
    signal.SIGKILL: "often out of memory, ended by the kernel or by Ray",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up",
    signal.SIGBUS: "often no room left in /dev/shm",
}
PR_SET_PDEATHSIG = 1
_SET_DEATH_SIGNAL_AND_EXEC = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, int(sys.argv[1])); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)


ALLOWED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|PWD|TERM|COLUMNS|TZ|TMPDIR|LANG|LANGUAGE|LC_\w+|PYTHON\w+|VIRTUAL_ENV|CONDA_PREFIX|"
    r"LD_LIBRARY_PATH|(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|CUDA_VISIBLE_DEVICES|XDG_\w+|SSL_CERT_(FILE|DIR)|"
    r"(REQUESTS|CURL)_CA_BUNDLE|HF_(HOME|ENDPOINT|HUB_CACHE|HUB_OFFLINE|DATASETS_CACHE|DATASETS_OFFLINE)|TRANSFORMERS_OFFLINE|"
    r"MODELSCOPE_(CACHE|ENDPOINT|DOMAIN|HOME)|"
    r"(HIP|ROCR)_VISIBLE_DEVICES|NO_PROXY|no_proxy|CORRAL_UP"
)
"""Environment variables that processes with somebody's code get: none that has a password, a key or a token in it.
The last is the mark by which `corral down` finds processes."""


def allowed_environment(names: Iterable[str] = ()) -> dict[str, str]:
    """The environment of a process that runs rewards, environments, tools or agents: variables that are no secret, and
    those that the recipe names."""
    named = set(names)
    return {name: value for name, value in os.environ.items() if name in named or ALLOWED.fullmatch(name)}


def with_kept_variable(error: str) -> str:
    """Explains a KeyError of such a process, where it is about a variable that it was not given."""
    found = re.search(r"KeyError: '(\w+)'", error)
    if found is None or found[1] not in os.environ or ALLOWED.fullmatch(found[1]):
        return error
    return f"{error}; the variable {found[1]} is not passed on, unless the recipe says `environment.env: [{found[1]}]`"


def start_child(
    command: Sequence[str],
    *,
    stdin: int | IO[Any] = subprocess.DEVNULL,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    pass_fds: Collection[int] = (),
    death_signal: signal.Signals | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a program as the leader of a process group of its own: Ctrl-C in the terminal does not reach it, and
    whatever it starts can be ended with it. `death_signal`: sent to it when the starting thread ends, see
    `command_dying_with_parent`."""
    return subprocess.Popen(
        list(command) if death_signal is None else command_dying_with_parent(command, death_signal),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=env,
        cwd=cwd,
        pass_fds=pass_fds,
        start_new_session=True,
    )


def signal_group(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to every process of the group that `pid` leads; nothing happens if there is none left."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def terminate_group(process: "subprocess.Popen[Any]", grace_s: float = 0.0) -> int:
    """End a child and all that is left of its group: SIGTERM, `grace_s` for the child to end by itself, then SIGKILL.
    Returns its exit code; negative: the signal that ended it."""
    if grace_s > 0:
        signal_group(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_EVERY_S)
    signal_group(process.pid)  # also after a child that ended in time: what it had started may be left
    return process.wait()


def describe_exit(code: int | None) -> str:
    """How a process ended, as the rest of a sentence that begins with its name."""
    if code is None:
        return "ended, nobody knows how"
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "a real-time signal"
    hint = f"; {HINTS[-code]}" if -code in HINTS else ""
    return f"was killed by signal {-code} ({name}{hint})"


def last_lines(output: Path | IO[bytes], number: int) -> list[str]:
    """The last lines of a log or temporary file that are not blank; none if there is no such file."""
    if isinstance(output, Path):
        try:
            with output.open("rb") as file:
                return last_lines(file, number)
        except OSError:
            return []
    output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL_BYTES))
    lines = (line.rstrip() for line in output.read().decode(errors="replace").splitlines())
    return [line for line in lines if line][-number:]


class ProcessStat(NamedTuple):
    """State of a process or thread, as the kernel has it."""

    name: str
    """Of a program, its file's name, of which the kernel keeps 15 characters."""
    state: str
    """A letter: R runs, S waits, D waits for a disk, T is stopped, Z has ended."""
    parent: int
    """Process id of the parent."""
    group: int
    """Its process group."""
    cpu_ticks: int
    """CPU time that it has used."""
    started: int
    """Start time in ticks since the machine was started: tells it from a later process with the same id."""


def read_stat(pid: int, thread: int | None = None) -> ProcessStat | None:
    """The state of a process, or of one of its threads; None where there is no such process."""
    folder = f"/proc/{pid}" if thread is None else f"/proc/{pid}/task/{thread}"
    try:
        start, _, rest = Path(folder, "stat").read_text().rpartition(")")  # a name may have brackets and spaces in it
    except OSError:  # it has ended, perhaps just now
        return None
    fields = rest.split()
    return ProcessStat(
        name=start.partition("(")[2],
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        started=int(fields[19]),
    )


# --- dying with the parent. Linux only: elsewhere a child may outlive it.


def command_dying_with_parent(command: Sequence[str], number: signal.Signals = signal.SIGKILL) -> list[str]:
    """The command for a program that gets this signal when the thread which starts it ends, however that came about.
    PR_SET_PDEATHSIG outlasts exec, so a first, tiny program sets it and becomes the real one."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _SET_DEATH_SIGNAL_AND_EXEC, str(number.value), *command]


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Called in a child that is Python of our own: the kernel sends it this signal when the thread that started it
    ends. Without it, code that never returns would outlive a killed run, since it does not see its socket close."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def die_with_stdin() -> None:
    """Called in a child whose standard input is a pipe from its parent: a thread waits for the end of it, which comes
    with the parent's, and then kills the whole group. Unlike `die_with_parent` this ends what the child has started,
    too."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


# --- the shim that records how a worker ended


def run_and_record_exit(folder: Path, name: str, command: list[str]) -> int:
    child = os.fork()
    if child == 0:
        die_with_parent()
        os.execvp(command[0], command)
    # When a worker ends, Ray kills what is left of its process group. The exit code would be lost with this process.
    with suppress(OSError):
        os.setpgid(0, os.getpgid(os.getppid()))
    for number in PASSED_ON:
        signal.signal(number, lambda received, _: os.kill(child, received))
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # not reaped yet, so that a signal still has a receiver
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    with suppress(FileNotFoundError):  # the folder is removed at the end of a run, when nobody asks any more
        work = folder / f".exit-{name}"
        work.write_text(str(code))
        work.rename(folder / f"exit-{name}")
    return code if code >= 0 else 128 - code


def read_exit(folder: Path, name: str) -> int | None:
    """The exit code that the shim has recorded; negative: the signal that ended the process. None: not known, or still
    running. The name is not the process id: a process that dies while it starts could not report its own."""
    try:
        return int((folder / f"exit-{name}").read_text())
    except FileNotFoundError:
        return None


# --- folders that go when the last process that uses them has ended, however it ended


def hold_folder(folder: Path) -> int:
    """Makes the folder where it is missing, and holds it until this process ends, or closes the descriptor that is
    returned."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileNotFoundError):  # it was removed just now, for another process that had held it
            descriptor = os.open(folder, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if folder.exists() and folder.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
            os.close(descriptor)


def remove_when_released(folder: Path) -> None:
    """Starts a process that outlives this one, waits until nobody holds the folder, and removes it."""
    command = [sys.executable, "-I", "-S", __file__, "--remove", str(folder)]
    start_child(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait()


def remove_released_folder(folder: Path) -> None:
    """Removes a folder, once nobody holds it, unless there are logs in it. The process that was started returns at
    once, and a child does it: so it is nobody's child, and is not ended with those of a worker by Ray."""
    if os.fork():
        return
    with suppress(FileNotFoundError):
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits
        # The shim of a worker, which does not hold the folder, may write an exit code in the middle of this.
        for _ in range(REMOVE_ATTEMPTS):
            remove_folder(folder)
            if not folder.exists():
                return
            time.sleep(POLL_EVERY_S)


def remove_folder(folder: Path) -> None:
    """Removes a folder unless there are logs in it, and what the workers that have a `heartbeat-PID` there have left in
    /dev/shm: torch counts who maps memory of a GPU, in files that stay when a process is killed."""
    for heartbeat in folder.glob("heartbeat-*"):
        for counts in Path("/dev/shm").glob(f"torch_{heartbeat.name.partition('-')[2]}_*"):
            with suppress(OSError):
                counts.unlink()
    if not any(folder.glob("*.log")):
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1] == "--remove":
        remove_released_folder(Path(sys.argv[2]))
        sys.exit()
    sys.exit(run_and_record_exit(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
