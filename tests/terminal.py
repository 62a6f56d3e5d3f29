"""`corral ...` on a terminal, typed at and read by a test."""

import fcntl
import os
import struct
import sys
import termios
from functools import partial
from pathlib import Path

import pexpect.fdpexpect
from commands import Command, start_corral
from deadlines import within

TIMEOUT_S = within(30)
SIZE = (40, 150)


class Terminal:
    """The program's end is its controlling terminal, so that Ctrl-C reaches it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *SIZE, 0, 0))
        self.screen = pexpect.fdpexpect.fdspawn(ours, timeout=TIMEOUT_S, encoding="utf-8")
        self.command: Command = start_corral(folder, *arguments, before=partial(take_terminal, os.ttyname(theirs)))
        self.screen.expect("\r\n")  # it is there
        os.close(theirs)

    def expect(self, pattern: str) -> str:
        """What was there before it, and the match."""
        try:
            self.screen.expect(pattern)
        except (pexpect.EOF, pexpect.TIMEOUT) as error:
            raise AssertionError(f"no {pattern!r} in:\n{self.screen.before}") from error
        return f"{self.screen.before}{self.screen.after}"

    def say(self, line: str) -> None:
        self.screen.send(f"{line}\n")

    def press_ctrl_c(self) -> None:
        self.screen.send("\x03")

    def finish(self) -> tuple[int, str]:
        """Its exit code, and the rest of what it said."""
        self.screen.expect(pexpect.EOF)
        return self.command.wait().code, str(self.screen.before)


def take_terminal(path: str) -> None:
    os.setsid()
    terminal = os.open(path, os.O_RDWR)  # of a process without one, the first becomes its own
    for number in (0, 1, 2):
        os.dup2(terminal, number)
    sys.stdin = os.fdopen(0)
    os.environ["TERM"] = "xterm-256color"
    print("terminal taken", flush=True)
