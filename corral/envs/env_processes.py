"""Environments whose methods block, in processes that can be killed.

A process runs one environment at a time and is used again for the next. A call that takes longer than
`environment.timeout_s` gets its process killed; that, or a process that dies, costs one trajectory and no more, since a
new process takes its place.

What waits for what: a trajectory's first call waits for a free process, however long that takes, and each call for its
future. A thread of the pool has one process. It waits for a trajectory (unblocked by `EnvProcesses.close`), then for
that trajectory's calls (unblocked by its `close`, or by `EnvProcesses.close`), and for replies (at most timeout_s).
Whatever way it leaves a call, it resolves its future.
"""

import asyncio
import pickle
import queue
import random
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corral.data.plugins import adopt, blamed_on, error_line, place_of, portable, with_place
from corral.data.rows import Message, Row
from corral.envs.base import Env, EnvWrapper, StepResult, find_class
from corral.recipe.errors import UserError
from corral.rewards.worker_pool import Served, WorkerPool, WorkerProcess, drained, serve_requests

if TYPE_CHECKING:
    from corral.recipe.schema import Environment

ATTRIBUTES = ("inline", "last_turns", "tools")
"""Attributes of the environment that the driver reads."""

Reply = dict[str, Any]
EnvCall = tuple[bytes, "Future[Reply]"]
"""The pickled request, and the reply to come."""


class EnvSlot:
    """A trajectory's use of a process: waited for, had, and released."""

    def __init__(self) -> None:
        self.is_taken = False
        self._calls: queue.SimpleQueue[EnvCall | None] = queue.SimpleQueue()
        self._lost: Exception | None = None
        self._lock = threading.Lock()

    async def call(self, method: str, *values: Any) -> Reply:
        try:
            request = pickle.dumps((method, values))
        except Exception as error:
            raise RuntimeError(f"the row can't be sent to another process: {error_line(error)}") from error
        future: Future[Reply] = Future()
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._calls.put((request, future))
        reply = await asyncio.wrap_future(future)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def next_call(self) -> EnvCall | None:
        """None: it is released."""
        while (call := self._calls.get()) is not None:
            if call[1].set_running_or_notify_cancel():
                break
        return call

    def release(self) -> None:
        self._calls.put(None)

    def fail(self, error: Exception) -> None:
        """The process is gone: `error` for the calls that wait, and for those that come."""
        with self._lock:
            self._lost = self._lost or error
            for _, future in drained(self._calls):
                if future.set_running_or_notify_cancel():
                    future.set_exception(error)
            self._calls.put(None)


class EnvProcesses(WorkerPool[EnvSlot]):
    """`num_processes` processes that run environments, from the first trajectory on."""

    thread_name = "environment process"

    def __init__(
        self, environment: "Environment", env_class: Any, arguments: dict[str, Any], prints: Path | None = None
    ) -> None:
        label = f"environment `{environment.name}`"
        for argument, value in arguments.items():
            try:
                pickle.dumps(value)
            except Exception as error:
                raise UserError(
                    f"{label}: its methods block, so it runs in other processes, and its argument "
                    f"`{argument}` can't be sent there ({error_line(error)}); make its methods `async def`"
                ) from error
        # A process finds the class by its name, since a class from a file can't be pickled.
        load = pickle.dumps((portable(environment.name), arguments))
        super().__init__(label, __name__, load, environment.processes, environment.env, prints)
        self.env_class, self._timeout_s = env_class, environment.timeout_s
        self._taken: set[EnvSlot] = set()

    def begin(self) -> EnvSlot:
        """A slot for a new trajectory, which its first call waits for."""
        slot = EnvSlot()
        self.submit(slot)
        return slot

    def _serve_job(self, worker: WorkerProcess, job: EnvSlot) -> WorkerProcess:
        """Answer the trajectory's calls."""
        job.is_taken = True
        with self._lock:
            self._taken.add(job)
            if self._unusable is not None:
                job.fail(self._unusable)
        try:
            worker = self._idle_worker(worker)
            while (call := job.next_call()) is not None:
                error = self._answer(worker, *call)
                if error is not None:
                    job.fail(error)
                    call[1].set_exception(error)
                    return self._start_worker()
            return worker
        except Exception as error:
            job.fail(error)
            raise
        finally:
            with self._lock:
                self._taken.discard(job)

    def _answer(self, worker: WorkerProcess, request: bytes, future: "Future[Reply]") -> Exception | None:
        """Why the process was lost, if it was."""
        try:
            future.set_result(worker.ask(request, self._timeout_s))
            return None
        except TimeoutError:
            self._end_worker(worker)
            late = f"the environment took longer than {self._timeout_s:g} s and its process was killed"
            return TimeoutError(with_place(late, place_of(getattr(self.env_class, pickle.loads(request)[0]))))
        except (EOFError, OSError, ValueError):
            ended = self._end_worker(worker)
            return self._unusable or RuntimeError(f"the environment's process died: it {ended}")

    def _fail(self, job: EnvSlot, error: Exception) -> None:
        job.fail(error)

    def _refuse(self, error: Exception) -> None:
        with self._lock:
            super()._refuse(error)
            for slot in self._taken:
                slot.fail(error)


class ProcessEnv(Env):
    """One trajectory's environment, which runs in a process."""

    bounds_itself = True
    """Each call has its own deadline there; waiting for a free process has none."""

    def __init__(self, processes: EnvProcesses) -> None:
        self._processes = processes
        self._slot: EnvSlot | None = None
        self._state = ""
        self._frame: str | bytes | None = None
        self._summary: dict[str, float] = {}
        for name in ATTRIBUTES:
            setattr(self, name, getattr(processes.env_class, name))

    async def reset(self, row: Row, seed: int) -> list[Message]:
        self._slot = self._processes.begin()
        reply = await self._slot.call("reset", row, seed)
        for name, value in reply["attributes"].items():
            setattr(self, name, value)
        self._state, self._frame, self._summary = reply["state"], reply["frame"], reply["summary"]
        messages: list[Message] = reply["messages"]
        return messages

    async def step(self, reply: str) -> StepResult:
        answer = await self._call("step", reply)
        self._frame, self._summary = answer["frame"], answer["summary"]
        return StepResult(**answer["result"])

    async def close(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            try:
                if slot.is_taken and not slot.is_lost:
                    await slot.call("close")
            finally:
                slot.release()

    def state(self) -> str:
        """The state as it was after `reset`."""
        return self._state

    def draw_frame(self) -> str | bytes | None:
        """The frame as it was after the last step."""
        return self._frame

    def summary(self) -> dict[str, float]:
        """The summary as it was after the last step."""
        return self._summary

    async def random_reply(self, rng: random.Random) -> str | None:
        reply: str | None = (await self._call("random_reply", rng.getrandbits(63)))["reply"]
        return reply

    async def best_reply(self) -> str | None:
        reply: str | None = (await self._call("best_reply"))["reply"]
        return reply

    def has_policy(self, method: str) -> bool:
        return bool(self._processes.env_class.overrides(method))

    async def _call(self, method: str, *values: Any) -> Reply:
        assert self._slot is not None, f"{method} before reset"
        return await self._slot.call(method, *values)


class InProcessEnv(EnvWrapper):
    """A blocking environment in this process: for a debugger, which needs it here and lets everything else wait."""

    async def reset(self, row: Row, seed: int) -> list[Message]:
        messages: list[Message] = self.env.reset(row, seed)
        self.copy_attributes()
        return messages

    async def step(self, reply: str) -> StepResult:
        result: StepResult = self.env.step(reply)
        return result

    async def close(self) -> None:
        self.env.close()


# --- inside a process, which may be killed at any moment


def main(descriptor: int) -> None:
    serve_requests(descriptor, lambda message: Served(EnvServer(*pickle.loads(message)).answer))


class EnvServer:
    """Holds the environment of the present trajectory, and calls its methods."""

    def __init__(self, name: tuple[str, bytes | None], arguments: dict[str, Any]) -> None:
        self._env_class, self._arguments = find_class(adopt(*name)), arguments
        self._env: Any = None

    def answer(self, request: bytes) -> Reply:
        method, values = pickle.loads(request)
        reply: Reply = getattr(self, method)(*values)
        return reply

    def reset(self, row: Any, seed: int) -> Reply:
        self._env = self._env_class(**self._arguments)
        messages = self._env.reset(row, seed)
        attributes = {name: getattr(self._env, name) for name in ATTRIBUTES}
        return {
            "messages": messages,
            "attributes": attributes,
            "state": self._env.first_state(),
            "frame": self._env.draw_frame(),
            "summary": self._summary(),
        }

    def step(self, reply: str) -> Reply:
        result = self._env.step(reply)
        with blamed_on(self._env.step):
            if not isinstance(result, StepResult):
                raise TypeError(f"it returned {result!r:.100}, which is not a StepResult")
            metrics = {name: float(value) for name, value in result.metrics.items()}
            reward = None if result.reward is None else float(result.reward)
        numbers = {"reward": reward, "done": bool(result.done), "metrics": metrics}
        return {"result": {**vars(result), **numbers}, "frame": self._env.draw_frame(), "summary": self._summary()}

    def close(self) -> Reply:
        env, self._env = self._env, None
        if env is not None:
            env.close()
        return {}

    def random_reply(self, seed: int) -> Reply:
        return {"reply": self._env.random_reply(random.Random(seed))}

    def best_reply(self) -> Reply:
        return {"reply": self._env.best_reply()}

    def _summary(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._env.summary().items()}
