"""Reward functions, and other code of somebody's, in processes that may be killed at any moment: one that hangs or
crashes costs one sample and no more.

`ScorerPool` runs the reward function. A thread of the pool takes the next job, sends it to its worker process and waits
for the reply until the deadline; a worker that is late is killed, one that is late or dead is replaced at once, before
the next job is taken. Of a quick function a thread takes several jobs at once, where many wait, and hands several
scores to the event loop at once: to change between threads takes longer than the function does. The worker still has
one after the other, each with its own deadline and its own reply; those behind one that is late or deadly are put back
into the queue. Whatever way a thread leaves its job, it resolves the future for which `score` waits.

`WorkerPool` is what it has in common with `EnvProcesses`: threads, each with a `WorkerProcess`, that take jobs from one
queue. Threads rather than asyncio, because the event loop may stand still for seconds while a model computes; the
deadlines here go on all the same, and a pool can be used from one event loop after another.

Messages are a length, then bytes. Requests are pickled (we send them to ourselves); replies are JSON, since what runs
in a worker is not ours. At the end of the file is what a worker process itself does; it imports nothing heavy.
"""

import asyncio
import contextlib
import functools
import json
import math
import os
import pickle
import queue
import select
import socket
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from corral.child_process import describe_exit, die_with_parent, signal_group, start_child, terminate_group
from corral.data.plugins import adopt, error_line, portable
from corral.data.rows import Row
from corral.recipe.errors import UserError
from corral.rewards.reward_function import Score, call_reward, call_reward_async, check_name, load_function

if TYPE_CHECKING:
    from corral.recipe.schema import Environment, Reward

START_TIMEOUT_S = 120.0
"""Time for a process to import what it runs, and all that this imports."""
START_ATTEMPTS = 3
CLOSE_TIMEOUT_S = 5.0
MAX_READ_BYTES = 1 << 20
LENGTH = struct.Struct(">I")
BOOTSTRAP = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main(int(sys.argv[2]))"
MAX_JOBS_AT_ONCE = 16
AT_ONCE_S = 0.05
"""The jobs that a thread takes at once are to last at most this long."""

Item = TypeVar("Item")
Job = TypeVar("Job")


class RewardScorer(Protocol):
    """What runs the reward function: a `ScorerPool`, or for a debugger an `InProcessScorer`."""

    async def score(self, response: str, row: Row) -> Score:
        """Run the function on one response. Never raises for what the function does; see `Score.error`."""
        ...

    def close(self) -> None: ...


class ScorerPools:
    """The reward functions of a recipe: one scorer for each environment that uses one, by the environment's tag."""

    def __init__(self, by_tag: Mapping[str, RewardScorer]) -> None:
        self.by_tag = by_tag

    @classmethod
    def start(cls, environments: "Mapping[str, Environment]") -> "ScorerPools":
        """Returns when every function is loaded, in all pools at the same time; or raises what is wrong with one."""
        pools = {tag: ScorerPool(environment.reward) for tag, environment in environments.items()}
        try:
            for pool in pools.values():
                pool.start()
            for pool in pools.values():
                pool.check()
        except BaseException:
            cls(pools).close()
            raise
        return cls(pools)

    def close(self) -> None:
        for pool in self.by_tag.values():
            with contextlib.suppress(Exception):
                pool.close()


class InProcessScorer:
    """The reward function in this process, for a debugger, in place of a `ScorerPool`. Nothing bounds a call: who looks
    at it may take their time. `on_error` gets what the function raises, before that counts as a failed sample."""

    def __init__(self, reward: "Reward", on_error: Callable[[BaseException], None] = lambda error: None) -> None:
        self._reward, self._on_error = reward, on_error
        self._function = load_function(reward.name, reward.options)

    async def score(self, response: str, row: Row) -> Score:
        try:
            return await call_reward_async(self._function, response, row, self._reward.options)
        except (Exception, SystemExit) as error:
            self._on_error(error)
            return Score(self._reward.on_error, error=error_line(error))

    def close(self) -> None:
        """There is nothing to end."""


# --- worker processes, as their parent sees them


class Inbox:
    """What arrives on a socket. Messages that arrive together are read with one call of the system."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._buffer = connection, bytearray()
        self.messages: deque[bytes] = deque()
        """Messages that have arrived whole."""

    def receive(self) -> bytes:
        """The next message. EOFError if the other side is gone."""
        while not self.messages:
            self.read()
        return self.messages.popleft()

    def read(self) -> None:
        """Wait for more of what is sent."""
        chunk = self._connection.recv(MAX_READ_BYTES)
        if not chunk:
            raise EOFError
        self._buffer += chunk
        while len(self._buffer) >= LENGTH.size:
            end = LENGTH.size + int(LENGTH.unpack_from(self._buffer)[0])
            if len(self._buffer) < end:
                return
            self.messages.append(bytes(self._buffer[LENGTH.size : end]))
            del self._buffer[:end]

    @property
    def is_empty(self) -> bool:
        return not self.messages and not self._buffer


def framed(payload: bytes) -> bytes:
    return LENGTH.pack(len(payload)) + payload


class WorkerProcess:
    """A process that runs a module's `main`, and the socket to it.

    Belongs to the thread that made it: Linux kills the process when that thread ends (see `die_with_parent`).
    """

    def __init__(self, module: str) -> None:
        self._connection, theirs = socket.socketpair()
        self._connection.setblocking(False)
        self._inbox, self._outbox = Inbox(self._connection), bytearray()
        with theirs:
            bootstrap, descriptor = BOOTSTRAP.format(module=module), theirs.fileno()
            command = [sys.executable, "-u", "-c", bootstrap, json.dumps(sys.path), str(descriptor)]
            self._process = start_child(command, pass_fds=[descriptor], stdout=2)

    def ask(self, request: bytes, timeout_s: float) -> dict[str, Any]:
        """TimeoutError if there is no reply in time; EOFError, OSError or ValueError if there is no sound one."""
        self.send([request])
        return self.next_reply(timeout_s)

    def send(self, requests: Iterable[bytes]) -> None:
        """Queue requests, to be answered one after the other. They leave while `next_reply` waits: a process that is
        busy with the first may have no room for the last."""
        for request in requests:
            self._outbox += framed(request)

    def next_reply(self, timeout_s: float) -> dict[str, Any]:
        """The reply to the first request that has none yet; raises what `ask` does."""
        deadline = time.monotonic() + timeout_s
        while not self.has_reply:
            self._exchange(deadline - time.monotonic())
        reply = json.loads(self._inbox.receive())
        if not isinstance(reply, dict):
            raise ValueError("not a reply")
        return reply

    @property
    def has_reply(self) -> bool:
        """Whether `next_reply` would return at once."""
        return bool(self._inbox.messages)

    def is_idle(self) -> bool:
        """Whether it is alive, and has sent nothing that it was not asked for."""
        try:
            self._exchange(0)
        except TimeoutError:
            return self._inbox.is_empty
        except (EOFError, OSError):
            pass
        return False

    def _exchange(self, timeout_s: float) -> None:
        """Wait until the process takes or sends something."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        events = poll.poll(max(timeout_s, 0) * 1000)
        if not events:
            raise TimeoutError
        if events[0][1] == select.POLLOUT:
            del self._outbox[: self._connection.send(self._outbox)]
        else:
            self._inbox.read()  # before anything else: what a process sent before it died is read

    def kill(self) -> None:
        signal_group(self._process.pid)

    def end(self) -> str:
        """Kill it with all that it has started, if it isn't dead; returns how it ended."""
        if self._process.returncode is None:
            terminate_group(self._process)
            self._connection.close()
        return describe_exit(self._process.returncode)


class WorkerPool(ABC, Generic[Job]):
    """Threads that take jobs from one queue, each with a worker process of its own. They start with the first job.

    What waits for what: a thread waits for a job (unblocked by `close`), for a worker that loads (at most
    START_TIMEOUT_S), or for a reply to a job (with the subclass's deadline, and sooner if the worker dies or `close`
    kills it). When something is wrong with all workers, every job that waits or comes gets that error.

    `label` names what they run, for errors; `module` is that of their `main`; `load` is their first message.
    """

    thread_name = "worker"

    def __init__(self, label: str, module: str, load: bytes, num_workers: int) -> None:
        self.label, self.module, self.load, self.num_workers = label, module, load, num_workers
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._alive: set[WorkerProcess] = set()
        self._loaded: Future[None] = Future()
        self._unusable: Exception | None = None
        """Why no more jobs are taken."""
        self._lock = threading.RLock()

    @abstractmethod
    def _serve_job(self, worker: WorkerProcess, job: Job) -> WorkerProcess:
        """Do a job; returns the worker for the next one."""

    @abstractmethod
    def _fail(self, job: Job, error: Exception) -> None:
        """Tell whoever waits for a job that it is not done, and why."""

    def start(self) -> None:
        """Start the workers in the background; returns at once."""
        with self._lock:
            if not self._threads and self._unusable is None:
                self._threads = [
                    threading.Thread(target=self._serve, name=f"{self.thread_name} {number}", daemon=True)
                    for number in range(self.num_workers)
                ]
                for thread in self._threads:
                    thread.start()

    def check(self) -> None:
        """Wait until a worker has loaded what it is to run; UserError if that can't be."""
        self.start()
        self._loaded.result()

    def submit(self, job: Job) -> None:
        with self._lock:
            if self._unusable is not None:
                raise self._unusable
            self._jobs.put(job)
            self.start()

    def close(self) -> None:
        """Kill all workers; calls in flight raise."""
        self._refuse(RuntimeError(f"{self.label} is closed"))
        with self._lock:
            for worker in self._alive:
                worker.kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)

    def _serve(self) -> None:
        """A thread's loop: consumes jobs with its worker until `close`."""
        worker = None
        try:
            worker = self._start_worker()
            while (job := self._jobs.get()) is not None:
                worker = self._serve_job(worker, job)
        except Exception as error:
            self._refuse(error)
        finally:
            if worker is not None:
                self._end_worker(worker)

    def _start_worker(self) -> WorkerProcess:
        """A worker that has loaded what it is to run. UserError if that can't be."""
        ended = ""
        for _ in range(START_ATTEMPTS):
            with self._lock:
                if self._unusable is not None:
                    raise self._unusable
                worker = WorkerProcess(self.module)
                self._alive.add(worker)
            try:
                reply = worker.ask(self.load, START_TIMEOUT_S)
            except TimeoutError as error:
                self._end_worker(worker)
                raise UserError(f"{self.label}: loading it took longer than {START_TIMEOUT_S:g} s") from error
            except (EOFError, OSError, ValueError):
                ended = self._end_worker(worker)
                continue
            if "unusable" in reply:
                self._end_worker(worker)
                raise UserError(reply["unusable"])
            with self._lock:
                if not self._loaded.done():
                    self._loaded.set_result(None)
            return worker
        raise UserError(f"{self.label}: its process died {START_ATTEMPTS} times while loading it: it {ended}")

    def _idle_worker(self, worker: WorkerProcess) -> WorkerProcess:
        """This worker, or a new one if it died after its last job, which is not the next job's fault."""
        if worker.is_idle():
            return worker
        self._end_worker(worker)
        return self._start_worker()

    def _end_worker(self, worker: WorkerProcess) -> str:
        """End a worker; returns how it ended."""
        with self._lock:
            self._alive.discard(worker)  # first, so that `close` signals no process that is gone
        return worker.end()

    def _refuse(self, error: Exception) -> None:
        """Refuse all jobs that wait and that come, with this error."""
        with self._lock:
            self._unusable = self._unusable or error
            for job in drained(self._jobs):
                self._fail(job, error)
            if not self._loaded.done():
                self._loaded.set_exception(error)


def drained(items: "queue.SimpleQueue[Item | None]") -> Iterator[Item]:
    """Everything that is in the queue now."""
    with contextlib.suppress(queue.Empty):
        while True:
            item = items.get_nowait()
            if item is not None:
                yield item


# --- the pool that runs a reward function


@dataclass(frozen=True)
class ScoringJob:
    response: str
    row: Row
    future: "asyncio.Future[Score]"


class ScorerPool(WorkerPool[ScoringJob]):
    """`reward.workers` processes that run the reward function, from `start`, `check` or the first `score` on."""

    thread_name = "reward worker"

    def __init__(self, reward: "Reward") -> None:
        check_name(reward.name)
        load = pickle.dumps((portable(reward.name), reward.options))
        super().__init__(f"reward `{reward.name}`", __name__, load, reward.workers)
        self._reward = reward
        self._job_s = math.inf
        """Seconds that each of the last jobs took."""

    async def score(self, response: str, row: Row) -> Score:
        """Run the function on one response. Never raises for what the function does; see `Score.error`."""
        job = ScoringJob(response, row, asyncio.get_running_loop().create_future())
        self.submit(job)
        return await job.future

    def _serve_job(self, worker: WorkerProcess, job: ScoringJob) -> WorkerProcess:
        """Resolve the future of the job and of some more, or put back what was not begun."""
        jobs, began = [job, *self._more_jobs()], time.monotonic()
        try:
            worker = self._idle_worker(worker)
            is_well = self._run(worker, jobs)
        except Exception as error:
            resolve([(job, error) for job in jobs])
            raise
        self._job_s = (time.monotonic() - began) / len(jobs)
        return worker if is_well else self._start_worker()

    def _more_jobs(self) -> Iterator[ScoringJob]:
        """Jobs to go with one that was taken. Of a short queue none, so that no other worker runs dry."""
        num_quick = int(AT_ONCE_S / max(self._job_s, AT_ONCE_S / MAX_JOBS_AT_ONCE))
        for _ in range(min(self._jobs.qsize() // (2 * self.num_workers), num_quick - 1)):
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is None:
                self._jobs.put(None)  # the end, for the thread that looks there next
                return
            yield job

    def _run(self, worker: WorkerProcess, jobs: Sequence[ScoringJob]) -> bool:
        """Whether the worker is fit for more."""
        sent = [(job, request) for job in jobs if (request := self._request(job)) is not None]
        worker.send(request for _, request in sent)
        waiting = deque(job for job, _ in sent)
        scored: list[tuple[ScoringJob, Score]] = []
        while waiting:
            score, is_lost = self._next_score(worker)
            scored.append((waiting.popleft(), score))
            if is_lost or not waiting or not worker.has_reply:
                self._settle(scored, put_back=waiting if is_lost else ())
                scored = []
            if is_lost:
                return False
        return True

    def _request(self, job: ScoringJob) -> bytes | None:
        """None: nobody waits for the job any more, or it has failed."""
        if job.future.cancelled():
            return None
        try:
            return pickle.dumps((job.response, job.row))
        except Exception as error:
            self._settle([(job, self._failed(f"the row can't be sent to another process: {error_line(error)}"))])
            return None

    def _next_score(self, worker: WorkerProcess) -> tuple[Score, bool]:
        """The score of the next job, and whether the worker was lost with it."""
        timeout_s = self._reward.timeout_s
        try:
            reply = worker.next_reply(timeout_s)
        except TimeoutError:
            self._end_worker(worker)
            return self._failed(f"the reward function took longer than {timeout_s:g} s and was killed"), True
        except (EOFError, OSError, ValueError):
            return self._failed(f"the reward function's process died: it {self._end_worker(worker)}"), True
        if "error" in reply:
            return self._failed(reply["error"]), False
        return Score(reply["reward"], metrics=reply["metrics"]), False

    def _failed(self, error: str) -> Score:
        return Score(self._reward.on_error, error=error)

    def _settle(self, scored: Sequence[tuple[ScoringJob, Score]], put_back: Iterable[ScoringJob] = ()) -> None:
        """Resolve jobs that are done, and put back those that were not begun."""
        with self._lock:
            if self._unusable is not None:
                raise self._unusable
            for job in put_back:
                self._jobs.put(job)
        resolve(scored)

    def _fail(self, job: ScoringJob, error: Exception) -> None:
        resolve([(job, error)])


def resolve(answers: "Sequence[tuple[ScoringJob, Score | Exception]]") -> None:
    """Resolve futures in the event loops that wait. Each loop is woken once, which takes longer than to resolve one."""

    def set_results(own: "Sequence[tuple[asyncio.Future[Score], Score | Exception]]") -> None:
        for future, answer in own:
            if future.done():  # it was cancelled
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    for loop in {job.future.get_loop() for job, _ in answers}:
        own = [(job.future, answer) for job, answer in answers if job.future.get_loop() is loop]
        with contextlib.suppress(RuntimeError):  # it is closed: nobody waits any more
            loop.call_soon_threadsafe(set_results, own)


# --- inside a worker process. It holds no state that matters; what the user's code prints goes to the run's stderr


def main(descriptor: int) -> None:
    serve_requests(descriptor, load_scorer)


def load_scorer(message: bytes) -> Callable[[bytes], dict[str, Any]]:
    name, options = pickle.loads(message)
    function = load_function(adopt(*name), options)

    def score(request: bytes) -> dict[str, Any]:
        response, row = pickle.loads(request)
        result = call_reward(function, response, row, options)
        return {"reward": result.reward, "metrics": result.metrics}

    return score


def serve_requests(descriptor: int, load: Callable[[bytes], Callable[[bytes], dict[str, Any]]]) -> None:
    """The loop of a worker process with the pool at the other end of the socket `descriptor`. `load` takes the first
    message and returns what answers the others."""
    die_with_parent()
    sys.breakpointhook = _no_terminal
    os.set_inheritable(descriptor, False)  # not for programs that the user's code starts
    connection = socket.socket(fileno=descriptor)
    inbox = Inbox(connection)

    def send(answer: Callable[[], dict[str, Any]]) -> None:
        try:
            reply = json.dumps(answer())
        except BaseException as error:  # also SystemExit: this request failed, the worker is well
            reply = json.dumps({"error": error_line(error)})
        connection.sendall(framed(reply.encode()))

    try:
        try:
            answer = load(inbox.receive())
        except (UserError, SystemExit) as error:
            unusable = str(error)
            return send(lambda: {"unusable": unusable})
        send(lambda: {"ready": True})
        while True:
            request = inbox.receive()
            send(functools.partial(answer, request))
    except (EOFError, ConnectionError):
        return  # the pool is closed, or its process is gone


def _no_terminal(*_: Any, **__: Any) -> None:
    if os.environ.get("PYTHONBREAKPOINT") != "0":
        raise RuntimeError("code in a process of its own has no terminal for breakpoint(); `corral train --debug` has")
