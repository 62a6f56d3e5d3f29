"""Groups of workers: where code runs is decided here, and the loop does not see the difference.

A group is the workers that host one role, ranked 0, 1, ... Its methods are asked for by name: on all, on one, or
with its own arguments on each. Every wait has a deadline, and an error says which worker on which node it was.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

from corral.recipe.errors import RunError

GRACE_S = 5.0
"""When a worker dies, those that talk to it fail too, sometimes sooner. So long the true cause is waited for."""


class WorkerLost(RunError):
    """A worker's process has ended, or its node is gone. The message says which, how, and what it said last."""

    def __init__(self, message: str, *, device: int | None = None, node: str | None = None) -> None:
        """`device`: its number in the recipe. `node`: the address of the node, where that is gone."""
        super().__init__(message)
        self.device, self.node = device, node


class CallTimeout(RunError):
    """No answer within the deadline."""


class Group(ABC):
    def __init__(self, role: str, names: Sequence[str], timeout_s: float) -> None:
        self.role, self.timeout_s = role, timeout_s
        self.names = list(names)
        """Of the workers, for people: `device 3 on 10.0.0.2`."""

    @property
    def size(self) -> int:
        return len(self.names)

    @abstractmethod
    def send(self, rank: int, method: str, arguments: tuple[Any, ...]) -> Awaitable[Any]:
        """The answer, or what the worker raised, or `WorkerLost`."""

    async def one(self, rank: int, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        limit = timeout_s or self.timeout_s
        try:
            async with asyncio.timeout(limit):
                return await self.send(rank, method, arguments)
        except TimeoutError:
            raise CallTimeout(
                f"{self.role}.{method}: no answer from {self.names[rank]} within {limit:g} s; it may hang, or "
                "`cluster.call_timeout_s` is too short for it"
            ) from None

    async def all(
        self, method: str, *arguments: Any, ranks: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """On all workers, or on those of `ranks`."""
        chosen = range(self.size) if ranks is None else ranks
        return await self.each(method, [arguments] * len(chosen), ranks=chosen, timeout_s=timeout_s)

    async def each(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """With its own arguments on each; answers in the order asked. If one fails, the others are not waited for."""
        chosen = range(self.size) if ranks is None else ranks
        return await together(
            *(self.one(rank, method, *own, timeout_s=timeout_s) for rank, own in zip(chosen, arguments, strict=True))
        )


async def together(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Their answers. If one fails the others are not waited for; a worker that was lost explains the rest."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    if not tasks:
        return []
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if any(task.done() and task.exception() is not None for task in tasks):
            if not isinstance(root_cause(tasks), WorkerLost):
                await asyncio.wait(tasks, timeout=GRACE_S)
            raise root_cause(tasks)
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()


def root_cause(tasks: Sequence["asyncio.Future[Any]"]) -> BaseException:
    errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
    return next((error for error in errors if isinstance(error, WorkerLost)), errors[0])


class LocalGroup(Group):
    """Roles in this process. What computes does so at once, in the caller's thread."""

    def __init__(self, role: str, hosted: Sequence[Any], timeout_s: float) -> None:
        super().__init__(role, ["this process"] * len(hosted), timeout_s)
        self.hosted = hosted

    async def send(self, rank: int, method: str, arguments: tuple[Any, ...]) -> Any:
        answer = getattr(self.hosted[rank], method)(*arguments)
        return await answer if asyncio.iscoroutine(answer) else answer
