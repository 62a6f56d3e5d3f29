"""Groups of workers: where code runs is decided here, and the loop does not see the difference.

A group is the workers that host one role, ranked 0, 1, ... Its methods are asked for by name, on all workers, on one, or
with its own arguments on each. Every wait has a deadline, and an error says which worker on which node it was.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from typing import Any

from corral.recipe.errors import RunError

GRACE_S = 5.0
"""When a worker dies, those that talk to it fail too, sometimes sooner. So long the true cause is waited for."""


class WorkerLost(RunError):
    """A worker's process has ended, or its node is gone. The message says which, how, and what it said last."""

    def __init__(self, message: str, rank: int, *, node_lost: bool = False) -> None:
        super().__init__(message)
        self.rank, self.node_lost = rank, node_lost


class Late(RunError):
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
            raise Late(
                f"{self.role}.{method}: no answer from {self.names[rank]} within {limit:g} s; it may hang, or "
                "`cluster.call_timeout_s` is too short for it"
            ) from None

    async def all(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        return await self.each(method, [arguments] * self.size, timeout_s=timeout_s)

    async def each(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, timeout_s: float | None = None
    ) -> list[Any]:
        """Answers in the order of ranks. If one fails, the others are not waited for."""
        calls = [
            asyncio.ensure_future(self.one(rank, method, *own, timeout_s=timeout_s))
            for rank, own in enumerate(arguments)
        ]
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            if any(call.done() and call.exception() is not None for call in calls):
                await asyncio.wait(calls, timeout=GRACE_S)
                raise root_cause(calls)
            return [call.result() for call in calls]
        finally:
            for call in calls:
                call.cancel()


def root_cause(calls: Sequence["asyncio.Future[Any]"]) -> BaseException:
    """A worker that was lost explains the failures of the others."""
    errors = [error for call in calls if call.done() and (error := call.exception()) is not None]
    return next((error for error in errors if isinstance(error, WorkerLost)), errors[0])


class LocalGroup(Group):
    """Roles in this process. What computes does so at once, in the caller's thread."""

    def __init__(self, role: str, hosted: Sequence[Any], timeout_s: float) -> None:
        super().__init__(role, ["this process"] * len(hosted), timeout_s)
        self.hosted = hosted

    async def send(self, rank: int, method: str, arguments: tuple[Any, ...]) -> Any:
        answer = getattr(self.hosted[rank], method)(*arguments)
        return await answer if asyncio.iscoroutine(answer) else answer
