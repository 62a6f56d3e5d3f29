"""Ctrl-C and SIGTERM: the first one ends the run in good order, the second at once."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any


class Interrupted(Exception):
    """The user asked to stop while something was being played. Nothing has been changed by it yet."""


class Interrupt:
    """A request to stop waits for the end of the step while weights are being changed, and cuts playing short."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.notify = notify
        self.requested = False
        self._playing: asyncio.AbstractEventLoop | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def cuts_short(self, runner: asyncio.Runner) -> Iterator[None]:
        """What runs on `runner` within the block is cancelled by a request to stop, and `Interrupted` raised."""
        if self.requested:
            raise Interrupted
        self._playing = runner.get_loop()
        try:
            yield
        except asyncio.CancelledError:
            raise Interrupted from None
        finally:
            self._playing = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if self._playing is None:
            with suppress(RuntimeError):  # a signal may come in the middle of a write, where there is no other
                self.notify("stopping as soon as this step is done; Ctrl-C again stops at once")
        else:
            self._playing.call_soon_threadsafe(_cancel_all, self._playing)


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
