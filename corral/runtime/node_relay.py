"""One call of the controller for all workers of a node, which the node's relay passes on.

A call through Ray costs the controller about a millisecond of CPU time, whatever it carries: with a thousand workers,
each asked for eight things in a step, that is a large part of it. So where a group is large (`RELAYED_FROM`), the
controller calls the relay of each node, and the relay the workers beside it. What a worker raises, and its death, are
answers to the controller, which then does what it does for a call of its own.
"""

import asyncio
from collections.abc import Sequence
from enum import Enum
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

GRACE_S = 3.0
"""Seconds to wait, after a worker has failed, for the death of another that may have been the cause."""


class MissingAnswer(Enum):
    """What stands for the answer of a worker that gave none."""

    DIED = "its process has ended"
    LATE = "another failed before it had answered"


class NodeRelay:
    """An actor on each node of a large run."""

    async def call(self, role: str, method: str, calls: Sequence[tuple[Any, tuple[Any, ...]]]) -> list[Any]:
        """Calls a role's method on each worker, with its own arguments. Returns the answers when all are there, or soon
        after one has failed. `calls`: the worker's actor and the arguments."""
        references = [actor.call.remote(role, method, *arguments) for actor, arguments in calls]
        tasks = [asyncio.ensure_future(answer_of(reference)) for reference in references]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.done() and task.exception() is not None for task in tasks):
                await asyncio.wait(tasks, timeout=GRACE_S)
        except asyncio.CancelledError:
            for reference in references:
                ray.cancel(reference)
            raise
        return [outcome_of(task) for task in tasks]


class CallFailed(Exception):
    """A worker raised, or has ended. `answer`: what says so."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer


async def answer_of(reference: Any) -> Any:
    from corral.runtime.ray_group import RemoteError  # which imports this module

    try:
        answer = await reference
    except RayActorError:
        raise CallFailed(MissingAnswer.DIED) from None
    except RayError as error:
        raise CallFailed(RemoteError(None, str(error).strip().splitlines()[-1])) from None
    if isinstance(answer, RemoteError):
        raise CallFailed(answer)
    return answer


def outcome_of(task: "asyncio.Task[Any]") -> Any:
    if not task.done():
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio complains of late ones
        return MissingAnswer.LATE
    error = task.exception()
    return error.answer if isinstance(error, CallFailed) else task.result()
