"""A debugger on the terminal, for what runs in this process.

Python's own, with two differences. Its `quit` ends the run, where Python's would raise an error that counts as one of
the environment or reward function it was in. And Ctrl-C opens it where the program is, also before any breakpoint.
"""

import pdb
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Debugger(pdb.Pdb):
    thread: threading.Thread | None = None
    """Which waits for the user now."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options.pop("mode", None)  # from Python 3.14 on; `quit` would end the process
        super().__init__(*arguments, **{**options, "nosigint": True})

    def interaction(self, *arguments: Any) -> None:
        """Until the user says how to go on. KeyboardInterrupt after `quit`."""
        Debugger.thread = threading.current_thread()
        try:
            super().interaction(*arguments)
        finally:
            Debugger.thread = None
        if self.quitting:
            raise KeyboardInterrupt


@contextmanager
def debugger_installed() -> Iterator[None]:
    """For the time of the block `breakpoint()` and `pdb.set_trace()` open ours; what $PYTHONBREAKPOINT names, if it is
    set, is the user's choice and stays."""
    before, pdb.Pdb = pdb.Pdb, Debugger  # type: ignore[misc]
    try:
        yield
    finally:
        pdb.Pdb = before  # type: ignore[misc]


def open_where(number: int, frame: FrameType | None) -> None:
    """For Ctrl-C. At the prompt it takes back what was typed, as usual."""
    if Debugger.thread is None:
        Debugger().set_trace(frame)
    elif Debugger.thread is threading.current_thread():
        raise KeyboardInterrupt


def open_at(error: BaseException) -> None:
    """In the frame that raised it. KeyboardInterrupt after `quit`."""
    while error.__cause__ is not None:
        error = error.__cause__
    print(f"{type(error).__name__}: {error}")
    debugger = Debugger()
    debugger.reset()
    debugger.interaction(None, error.__traceback__)
