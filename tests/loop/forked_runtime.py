"""A `RayRuntime` without Ray: workers are forks of the test, so that they start at once. All else is the real one's."""

import asyncio
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from deadlines import within

from corral.child_process import die_with_parent
from corral.observe.console import Console
from corral.recipe.errors import RunError
from corral.recipe.placement import Placement
from corral.recipe.schema import Recipe
from corral.runtime.group import Group, RoleT, Runtime, WorkerLost
from corral.runtime.nodes import Node
from corral.runtime.ray_group import DeviceSlot
from corral.runtime.ray_runtime import DeviceSet, RayRuntime
from corral.runtime.remote_debugger import DebuggerOptions
from corral.runtime.worker import Worker

BUILDER = "replica_faults:build_role"


def serve(calls: Connection, rank: int, size: int) -> None:
    """Answers calls, many at a time, as `DeviceProcess` does."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    worker = Worker(rank, size, "127.0.0.1", timeout_s=within(120), threads=1, can_be_replaced=True)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def answer(number: int, role: str, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            result = await worker.call(role, method, arguments)
        except Exception as error:
            result = error if isinstance(error, RunError) else RunError(f"{role}.{method}: {error!r}")
        calls.send((number, result))

    while True:
        try:
            asyncio.run_coroutine_threadsafe(answer(*calls.recv()), loop)
        except EOFError:
            os._exit(0)


class ForkedProcess:
    """A worker's process, and the calls that it has not answered."""

    def __init__(self, device: int, rank: int, size: int) -> None:
        context = multiprocessing.get_context("fork")
        self.calls, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, rank, size))
        self.process.start()
        theirs.close()  # else others that are forked later keep it open
        self.device, self.pid, self.pending = device, self.process.pid, dict[int, asyncio.Future[Any]]()
        self.numbers, self.loop = itertools.count(), asyncio.get_running_loop()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, role: str, method: str, arguments: tuple[Any, ...]) -> Awaitable[Any]:
        number, answer = next(self.numbers), self.loop.create_future()
        self.pending[number] = answer
        try:
            self.calls.send((number, role, method, arguments))
        except OSError:
            answer.set_exception(self.lost)
        return answer

    @property
    def lost(self) -> WorkerLost:
        return WorkerLost(f"device {self.device}: its process (pid {self.pid}) has ended", device=self.device)

    def _read(self) -> None:
        while True:
            try:
                number, result = self.calls.recv()
            except (EOFError, OSError):
                self.loop.call_soon_threadsafe(self._fail)
                return
            self.loop.call_soon_threadsafe(self._finish, number, result)

    def _finish(self, number: int, result: Any) -> None:
        answer = self.pending.pop(number)
        if not answer.done():
            answer.set_exception(result) if isinstance(result, Exception) else answer.set_result(result)

    def _fail(self) -> None:
        for answer in self.pending.values():
            if not answer.done():
                answer.set_exception(self.lost)
        self.on_end(self)

    @staticmethod
    def on_end(process: "ForkedProcess") -> None:
        """Replaced by the runtime."""


class ForkedGroup(Group[RoleT]):
    def __init__(self, role: str, devices: Sequence[DeviceSlot], timeout_s: float) -> None:
        super().__init__(role, [str(device) for device in devices], timeout_s)
        self.devices = devices

    async def send(self, rank: int, method: str, arguments: tuple[Any, ...]) -> Any:
        device: Any = self.devices[rank]
        process = device.process
        try:
            return await process.send(self.role, method, arguments)
        except WorkerLost:
            device.is_dead |= device.process is process
            raise


class ForkedRuntime(RayRuntime):
    async def _start(self, placement: Placement, without: frozenset[str]) -> None:
        self.placement, self.loop = placement, asyncio.get_running_loop()
        self.sets = [
            DeviceSet(roles, devices, is_world="actor" in roles or "critic" in roles)
            for roles, devices in placement.groups().items()
        ]
        numbers = sorted(device for one in self.sets for device in one.devices)
        node = Node(0, "node", "127.0.0.1", "here", tuple(numbers))
        node.gone = asyncio.wrap_future(node.lost)
        self.nodes = [node]
        for number in numbers:
            self.devices[number] = DeviceSlot(number, node, self._fork(number), Path())
        self.groups = {role: self._group(role, devices) for role, devices in placement.roles.items()}

    def _fork(self, number: int) -> Any:
        own = self._set_of(number)
        process = ForkedProcess(number, own.devices.index(number), len(own.devices))
        process.on_end = self._notice_end  # type: ignore[method-assign]
        return process

    def _notice_end(self, process: ForkedProcess) -> None:
        device: Any = self.devices[process.device]
        if device.process is process and not device.is_dead:
            device.is_dead = True
            self.lost_workers.put_nowait(process.lost)

    def _group(self, role: str, devices: Sequence[int]) -> Any:
        return ForkedGroup(role, [self.devices[number] for number in devices], self.cluster.call_timeout_s)

    async def replace(self, device: int) -> None:
        own: Any = self.devices[device]
        own.is_dead = True
        own.process.process.kill()
        own.process = self._fork(device)
        own.is_dead = False

    def close(self) -> None:
        for device in self.devices.values():
            device.is_dead = True
            device.process.process.kill()  # type: ignore[attr-defined]
            device.process.process.join()  # type: ignore[attr-defined]


@asynccontextmanager
async def open_forks(
    recipe: Recipe, placement: Placement, logs: Path, console: Console, lost_nodes: frozenset[str] = frozenset()
) -> AsyncIterator[Runtime]:
    torch.set_num_threads(1)
    runtime = ForkedRuntime(recipe, logs, BUILDER, DebuggerOptions())
    runtime.report = console.note
    try:
        await runtime._start(placement, lost_nodes)
        yield runtime
    finally:
        runtime.close()
