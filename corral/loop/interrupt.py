"""Ctrl-C and SIGTERM: the first one ends the run in good order, the second at once."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

Answer = TypeVar("Answer")
Handler = Callable[[int, FrameType | None], None]


class Interrupted(Exception):
    """The user asked to stop while something was being played. No weight has been changed by it yet."""


class Interrupt:
    """A request to stop waits for the end of the step while weights are being changed, and cuts playing short."""

    def __init__(self, notify: Callable[[str], None], on_ctrl_c: Handler | None = None) -> None:
        """`on_ctrl_c`: a debugger's, which then has Ctrl-C for itself."""
        self.notify = notify
        self.handlers = {signal.SIGINT: on_ctrl_c or self._handle, signal.SIGTERM: self._handle}
        self.requested = False
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        for number, handler in self.handlers.items():
            self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    async def cuts_short(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """What `work` answers. A request to stop cancels it, and `Interrupted` is raised."""
        if self.requested:
            work.close()
            raise Interrupted
        stop, task = asyncio.Event(), asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(stop.wait())
        self._waiting = asyncio.get_running_loop(), stop
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Interrupted
        finally:
            self._waiting = None
            task.cancel()
            stopping.cancel()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._waiting is None:
            with suppress(RuntimeError):  # a signal may come in the middle of a write, where there is no other
                self.notify("stopping as soon as this step is done; Ctrl-C again stops at once")
        else:
            loop, stop = self._waiting
            loop.call_soon_threadsafe(stop.set)
