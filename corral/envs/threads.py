"""Threads for people's code that may block or never return. All are daemons, so that none of them keeps a run alive."""

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

Answer = TypeVar("Answer")
CLOSE_TIMEOUT_S = 5.0


class CallThread:
    """Runs one call after the other, all in the same thread: what one opens (SQLite, say) the next may use."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def submit(self, call: Callable[[], Answer]) -> "Future[Answer]":
        future: Future[Answer] = Future()
        self._jobs.put((future, call))
        return future

    def close(self) -> None:
        """The thread ends after what it was given so far; a call that hangs is left behind."""
        self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                answer = call()
            except BaseException as error:  # also SystemExit: the call failed, nothing else
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            else:
                future.set_result(answer)


def call_in_thread(call: Callable[[], Answer], name: str) -> "Future[Answer]":
    """One call in a thread of its own. A pool's threads would be used up by calls that hang."""
    thread = CallThread(name)
    future = thread.submit(call)
    thread.close()
    return future


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Coroutine[Any, Any, Answer]) -> "Future[Answer]":
        """Run a call from any other thread. Cancelling the future cancels the call."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def close(self) -> None:
        """Cancels whatever still runs."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S / 2))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
