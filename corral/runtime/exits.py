"""How a worker's process ended. Ray only says that an actor died; the one who knows is the process's parent.

So each worker is the child of this file, run as a program: it waits, and writes the exit status down. It needs the
standard library only and starts with none of the site's packages: `python -I -S exits.py FOLDER PYTHON ARGUMENTS...`
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HINTS = {
    signal.SIGKILL: "often out of memory, ended by the kernel or by Ray",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up",
    signal.SIGBUS: "often no room left in /dev/shm",
}


def main(folder: Path, command: list[str]) -> int:
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody is left without a parent
        os.execvp(command[0], command)
    for number in PASSED_ON:
        signal.signal(number, lambda received, _: os.kill(child, received))
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it is still there, so that a signal has somewhere to go
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if folder.is_dir():  # it is removed at the end of a run, when nobody asks any more
        work = folder / f".exit-{child}"
        work.write_text(str(code))
        work.rename(folder / f"exit-{child}")
    return code if code >= 0 else 128 - code


def read_exit(folder: Path, pid: int) -> int | None:
    """The exit code; negative: the signal that ended it. None: not known, or still running."""
    try:
        return int((folder / f"exit-{pid}").read_text())
    except FileNotFoundError:
        return None


def describe_exit(code: int | None) -> str:
    if code is None:
        return "ended, nobody knows how"
    if code >= 0:
        return f"ended with exit code {code}"
    number = signal.Signals(-code)
    hint = f"; {HINTS[number]}" if number in HINTS else ""
    return f"was killed by signal {-code} ({number.name}{hint})"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
