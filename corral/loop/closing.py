"""The end of an event loop, with a deadline."""

import asyncio

CLOSE_TIMEOUT_S = 5.0


def close_runner(runner: asyncio.Runner) -> None:
    """An environment may ignore that its task is cancelled; it is not waited for."""
    tasks = asyncio.all_tasks(runner.get_loop())
    for task in tasks:
        task.cancel()
    if tasks:
        runner.run(asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S))
    if all(task.done() for task in tasks):
        runner.close()
