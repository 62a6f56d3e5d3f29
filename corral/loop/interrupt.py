"""Ctrl-C and SIGTERM: the first one ends the run in good order, the second at once. And the end of its event loop."""

import asyncio
import signal
import threading
import warnings
from collections.abc import Callable, Coroutine
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

Answer = TypeVar("Answer")
SignalHandler = Callable[[int, FrameType | None], None]
CLOSE_TIMEOUT_S = 5.0


class Interrupted(Exception):
    """The user asked to stop during a rollout. No weight has been changed by it yet."""


class Interrupt:
    """A request to stop waits for the end of the step while weights are being changed, and cancels rollouts."""

    def __init__(self, notify: Callable[[str], None], on_ctrl_c: SignalHandler | None = None) -> None:
        """`on_ctrl_c`: a debugger's, which then has Ctrl-C for itself."""
        self.notify = notify
        self.handlers = {signal.SIGINT: on_ctrl_c or self._handle, signal.SIGTERM: self._handle}
        self.requested = False
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():  # no other may set handlers, nor gets signals
            for number, handler in self.handlers.items():
                self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    async def cancel_on_request(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Returns what `work` returns. A request to stop cancels it, and `Interrupted` is raised."""
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
        self.request()

    def request(self) -> None:
        """Asks the run to stop; may be called from any thread."""
        self.requested = True
        if self._waiting is None:
            with suppress(RuntimeError):  # a signal may come in the middle of a write, and a second is not allowed then
                self.notify("stopping as soon as this step is done; Ctrl-C again stops at once")
        else:
            loop, stop = self._waiting
            loop.call_soon_threadsafe(stop.set)


def close_runner(runner: asyncio.Runner) -> None:
    """Closes an event loop within a deadline. `Runner.close` would wait for tasks for ever, and an environment may
    ignore that its task is cancelled."""
    tasks = asyncio.all_tasks(runner.get_loop())
    _ = [task.cancel() for task in tasks]  # in a scope of its own, so that no variable keeps a task alive
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited")  # of tasks that had not begun
        if tasks:
            runner.run(asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S))
        if all(task.done() for task in tasks):
            runner.close()
        tasks.clear()
