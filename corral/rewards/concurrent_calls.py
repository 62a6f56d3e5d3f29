"""Hundreds of calls of an `async` reward function at once, in the event loop of one worker process.

Each call has its own deadline: one that is late is cancelled, and costs its own sample. A call that blocks the event
loop (`time.sleep`, a client that is not async) or kills the process would take all others with it, so the process marks
in memory that it shares with its parent which call is computing, and since when (`CallMark`). The parent kills a
process that computes at one call for longer than the deadline, fails this call, and puts the others back into the
queue.

This file is what happens inside the worker process; the parent's side is `ScorerPool` in `scorer_pool.py`.
"""

import asyncio
import json
import mmap
import os
import pickle
import socket
import struct
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from corral.data.plugins import error_line, with_place
from corral.rewards.reward_function import finite_numbers

LENGTH = struct.Struct(">I")
NUMBER, SINCE, ALIVE = 0, 8, 16
"""Where in the shared memory the number of the call is, since when it computes, and when the event loop last ran."""
HEARTBEAT_S = 1.0


def framed(payload: bytes) -> bytes:
    """A message: its length, then its bytes."""
    return LENGTH.pack(len(payload)) + payload


class CallMark:
    """Which call a process computes at, in memory that parent and process share: it can be read when the process is
    stuck or dead. The clock is the machine's, so both sides mean the same time."""

    def __init__(self, descriptor: int | None = None) -> None:
        """`descriptor`: of the parent's mark, in the process; None: makes a new one, in the parent."""
        if descriptor is None:
            with tempfile.TemporaryFile() as file:
                file.truncate(mmap.PAGESIZE)
                self.descriptor = os.dup(file.fileno())
        else:
            self.descriptor = descriptor
        self._memory = mmap.mmap(self.descriptor, mmap.PAGESIZE)
        self.beat()

    def set(self, number: int) -> None:
        # The time first: whoever reads a number then reads a time that is not before the number's.
        struct.pack_into("d", self._memory, SINCE, time.monotonic())
        struct.pack_into("q", self._memory, NUMBER, number)

    def clear(self) -> None:
        struct.pack_into("q", self._memory, NUMBER, 0)

    def beat(self) -> None:
        """The event loop runs."""
        struct.pack_into("d", self._memory, ALIVE, time.monotonic())

    @property
    def number(self) -> int:
        """The call that computes now, or computed when the process died. 0: none."""
        return int(struct.unpack_from("q", self._memory, NUMBER)[0])

    @property
    def seconds(self) -> float:
        """Time for which this call has not given the event loop back; 0 where none computes."""
        return self._since(SINCE) if self.number else 0.0

    @property
    def silence_s(self) -> float:
        """Time since the last `beat`."""
        return self._since(ALIVE)

    def _since(self, place: int) -> float:
        return time.monotonic() - float(struct.unpack_from("d", self._memory, place)[0])

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)


@dataclass(eq=False)
class CallInFlight:
    number: int
    deadline: float


CURRENT_CALL: ContextVar[CallInFlight | None] = ContextVar("current_call", default=None)


def extend_deadline(seconds: float) -> None:
    """Called in a reward function that waits for its turn: these seconds do not count as running."""
    call = CURRENT_CALL.get()
    if call is not None:
        call.deadline += seconds


class MarkedCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine of a call, whose every step is marked."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], mark: CallMark, number: int) -> None:
        self._coroutine, self._mark, self._number = coroutine, mark, number

    def send(self, value: Any) -> Any:
        self._mark.set(self._number)
        try:
            return self._coroutine.send(value)
        finally:
            self._mark.clear()

    def throw(self, *error: Any) -> Any:
        self._mark.set(self._number)
        try:
            return self._coroutine.throw(*error)
        finally:
            self._mark.clear()

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield from self._coroutine.__await__())


async def serve_concurrently(
    connection: socket.socket,
    score: Callable[[Any, Any], Awaitable[dict[str, Any]]],
    timeout_s: float,
    mark: CallMark,
    place: str | None = None,
) -> None:
    """Answers requests, each `(number, response, row)`, as they are done, until the other side closes. `place`: where
    the function is defined, for errors that leave no traceback."""
    reader, writer = await asyncio.open_connection(sock=connection)
    asyncio.get_running_loop().set_task_factory(
        # Also tasks that the function itself starts belong to its call.
        lambda loop, coroutine, **options: asyncio.Task(
            coroutine if (call := CURRENT_CALL.get()) is None else MarkedCoroutine(coroutine, mark, call.number),
            loop=loop,
            **options,
        )
    )

    async def answer(number: int, response: Any, row: Any) -> None:
        call = CallInFlight(number, time.monotonic() + timeout_s)
        CURRENT_CALL.set(call)
        task = asyncio.ensure_future(outcome(score(response, row)))
        while not task.done() and (left_s := call.deadline - time.monotonic()) > 0:
            await asyncio.wait({task}, timeout=left_s)
        task.cancel()  # not awaited: it may ignore that
        late = {"error": with_place(f"the reward function took longer than {timeout_s:g} s and was cancelled", place)}
        reply = task.result() if task.done() and not task.cancelled() else late
        writer.write(framed(json.dumps({"number": number, **reply}).encode()))

    async def beat() -> None:
        while True:
            mark.beat()
            await asyncio.sleep(HEARTBEAT_S)

    tasks: set[asyncio.Task[None]] = {asyncio.create_task(beat())}  # the event loop itself keeps none alive
    while True:
        try:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            request = await reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        task = asyncio.create_task(answer(*pickle.loads(request)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def outcome(work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """The reply of a call. What it raises is its own failure; a SystemExit would end the event loop."""
    try:
        return await work
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return error_reply(error)


def error_reply(error: BaseException) -> dict[str, Any]:
    """What is sent for a call that raised. An exception may have `metrics`, as results have them."""
    metrics = getattr(error, "metrics", None)
    return {"error": error_line(error), "metrics": finite_numbers(metrics) if isinstance(metrics, Mapping) else {}}
