"""The end of an event loop, with a deadline."""

import asyncio
import warnings
from collections.abc import Iterable
from typing import Any

CLOSE_TIMEOUT_S = 5.0


def close_runner(runner: asyncio.Runner) -> None:
    """An environment may ignore that its task is cancelled; it is not waited for."""
    tasks = asyncio.all_tasks(runner.get_loop())
    cancel(tasks)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "coroutine .* was never awaited")  # of tasks that had not begun
        if tasks:
            runner.run(asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S))
        if all(task.done() for task in tasks):
            runner.close()
        tasks.clear()


def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
