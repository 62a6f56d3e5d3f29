"""Environments whose methods block, in processes that can be killed.

A process plays one environment at a time and is used again for the next. A call that takes longer than
`environment.timeout_s` gets its process killed; that, or a process that dies, costs one trajectory and no more, since a
new process takes its place. Threads rather than asyncio, for the reasons in `rewards/pool.py`.

What waits for what: a trajectory's first call waits for a free process, however long that takes, and each call for its
future. A thread has one process. It waits for a trajectory (unblocked by `EnvProcesses.close`), then for that
trajectory's calls (unblocked by its `close`, or by `EnvProcesses.close`), and for replies (at most timeout_s). Whatever
way it leaves a call, it resolves its future.
"""

import asyncio
import contextlib
import pickle
import queue
import random
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from corral.data.plugins import error_line
from corral.data.rows import Message, Row
from corral.envs.base import StepResult
from corral.envs.process_worker import ATTRIBUTES
from corral.recipe.errors import UserError
from corral.rewards.process import WorkerProcess
from corral.rewards.workers import Workers

WORKER = "corral.envs.process_worker"
CLOSE_TIMEOUT_S = 5.0

Reply = dict[str, Any]


@dataclass(frozen=True)
class _Call:
    request: bytes
    future: "Future[Reply]"


class Place:
    """A trajectory's place in a process: waited for, had, and given back."""

    def __init__(self) -> None:
        self.is_taken = False
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lost: Exception | None = None
        self._lock = threading.Lock()

    async def call(self, method: str, *values: Any) -> Reply:
        try:
            call = _Call(pickle.dumps((method, values)), Future())
        except Exception as error:
            raise RuntimeError(f"the row can't be sent to another process: {error_line(error)}") from error
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._calls.put(call)
        reply = await asyncio.wrap_future(call.future)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def next_call(self) -> _Call | None:
        """None: it is given back."""
        while (call := self._calls.get()) is not None:
            if call.future.set_running_or_notify_cancel():
                return call
        return None

    def give_back(self) -> None:
        self._calls.put(None)

    def lose(self, error: Exception) -> None:
        """The process is gone: `error` for this call, and for those that come."""
        with self._lock:
            self._lost = self._lost or error
            with contextlib.suppress(queue.Empty):
                while True:
                    call = self._calls.get_nowait()
                    if call is not None and call.future.set_running_or_notify_cancel():
                        call.future.set_exception(error)
            self._calls.put(None)


class EnvProcesses:
    """`num_processes` processes that play environments, from the first trajectory on."""

    def __init__(self, name: str, made: Any, arguments: dict[str, Any], num_processes: int, timeout_s: float) -> None:
        self.made = made
        self._num_processes, self._timeout_s = num_processes, timeout_s
        self._workers = Workers(f"environment `{name}`", WORKER, _pickled(name, arguments))
        self._places: queue.SimpleQueue[Place | None] = queue.SimpleQueue()
        self._taken: set[Place] = set()
        self._threads: list[threading.Thread] = []
        self._lock = self._workers.lock

    def begin(self) -> Place:
        """A place for a new trajectory, which its first call waits for."""
        place = Place()
        with self._lock:
            if self._workers.unusable is not None:
                raise self._workers.unusable
            self._places.put(place)
            if not self._threads:
                self._threads = [
                    threading.Thread(target=self._serve, name=f"environment process {number}", daemon=True)
                    for number in range(self._num_processes)
                ]
                for thread in self._threads:
                    thread.start()
        return place

    def close(self) -> None:
        """Kill all processes; calls in flight raise."""
        self._refuse(RuntimeError("the environments' processes are closed"))
        self._workers.kill()
        for _ in self._threads:
            self._places.put(None)
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)

    def _serve(self) -> None:
        """A thread's life. Consumes trajectories; `close` ends it."""
        worker = None
        try:
            worker = self._workers.start()
            while (place := self._places.get()) is not None:
                worker = self._serve_trajectory(worker, place)
        except Exception as error:
            self._refuse(error)
        finally:
            if worker is not None:
                self._workers.end(worker)

    def _serve_trajectory(self, worker: WorkerProcess, place: Place) -> WorkerProcess:
        """Answer the trajectory's calls; returns the process for the next one."""
        place.is_taken = True
        with self._lock:
            self._taken.add(place)
            if self._workers.unusable is not None:
                place.lose(self._workers.unusable)
        try:
            if not worker.is_idle():  # it died after its last trajectory, which is not this one's fault
                self._workers.end(worker)
                worker = self._workers.start()
            while (call := place.next_call()) is not None:
                lost = self._answer(worker, call)
                if lost is not None:
                    place.lose(lost)
                    call.future.set_exception(lost)
                    return self._workers.start()
            return worker
        except Exception as error:
            place.lose(error)
            raise
        finally:
            with self._lock:
                self._taken.discard(place)

    def _answer(self, worker: WorkerProcess, call: _Call) -> Exception | None:
        """What the process was lost by, if it was."""
        try:
            reply = worker.ask(call.request, self._timeout_s)
        except TimeoutError:
            self._workers.end(worker)
            return TimeoutError(f"the environment took longer than {self._timeout_s:g} s and its process was killed")
        except (EOFError, OSError, ValueError):
            ended = self._workers.end(worker)
            return self._workers.unusable or RuntimeError(f"the environment's process died: it {ended}")
        call.future.set_result(reply)
        return None

    def _refuse(self, error: Exception) -> None:
        """From now on, and for all who wait: `error`."""
        with self._lock:
            self._workers.unusable = self._workers.unusable or error
            for place in self._taken:
                place.lose(error)
            with contextlib.suppress(queue.Empty):
                while True:
                    waiting = self._places.get_nowait()
                    if waiting is not None:
                        waiting.lose(error)


class ProcessEnv:
    """One trajectory's environment, which is played in a process."""

    bounds_itself = True
    """Each call has its own deadline there; waiting for a free process has none."""

    def __init__(self, processes: EnvProcesses) -> None:
        self._processes = processes
        self._place: Place | None = None
        self._state = ""
        self._summary: dict[str, float] = {}
        for name in ATTRIBUTES:
            if hasattr(processes.made, name):
                setattr(self, name, getattr(processes.made, name))

    @property
    def made(self) -> Any:
        """The class of the environment itself."""
        return self._processes.made

    async def reset(self, row: Row, seed: int) -> list[Message]:
        self._place = self._processes.begin()
        reply = await self._place.call("reset", row, seed)
        for name, value in reply["attributes"].items():
            setattr(self, name, value)
        self._state, self._summary = reply["state"], reply["summary"]
        messages: list[Message] = reply["messages"]
        return messages

    async def step(self, reply: str) -> StepResult:
        answer = await self._call("step", reply)
        self._summary = answer["summary"]
        return StepResult(
            messages=answer["messages"],
            reward=answer["reward"],
            done=answer["done"],
            metrics=answer["metrics"],
            error=answer["problem"],
            closing=answer["closing"],
            state=answer["state"],
        )

    async def close(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            try:
                if place.is_taken and not place.is_lost:
                    await place.call("close")
            finally:
                place.give_back()

    def state(self) -> str:
        """As it was after `reset`."""
        return self._state

    def summary(self) -> dict[str, float]:
        """As it was after the last step."""
        return self._summary

    async def random_reply(self, rng: random.Random) -> str:
        said: str = (await self._call("random_reply", rng.getrandbits(63)))["said"]
        return said

    async def best_reply(self) -> str | None:
        said: str | None = (await self._call("best_reply"))["said"]
        return said

    async def _call(self, method: str, *values: Any) -> Reply:
        assert self._place is not None, f"{method} before reset"
        return await self._place.call(method, *values)


class BlockingEnv:
    """The same without processes: for a debugger, which needs it here and lets everything else wait."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    async def reset(self, row: Row, seed: int) -> list[Message]:
        messages: list[Message] = self._env.reset(row, seed)
        return messages

    async def step(self, reply: str) -> StepResult:
        result: StepResult = self._env.step(reply)
        return result

    async def close(self) -> None:
        self._env.close()


def _pickled(name: str, arguments: dict[str, Any]) -> bytes:
    """What a process loads; it finds the class by its name, since a file's class can't be pickled."""
    for argument, value in arguments.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise UserError(
                f"environment `{name}`: its methods block, so it is played in other processes, and its argument "
                f"`{argument}` can't be sent there ({error_line(error)}); make its methods `async def`"
            ) from error
    return pickle.dumps((name, arguments))
