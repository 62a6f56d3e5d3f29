"""Processes that run code of somebody's and may be killed at any moment, and the threads that send them jobs.

`WorkerPool` is what `ScorerPool` (reward functions) and `EnvProcesses` (environments that block) have in common:
threads, each with a `WorkerProcess`, that take jobs from one queue. Threads rather than asyncio, because the event loop
may stand still for seconds while a model computes; the deadlines here go on all the same, and a pool can be used from
one event loop after another.

Messages are a length, then bytes. Requests are pickled (we send them to ourselves); replies are JSON, since what runs
in a worker is not ours. At the end of the file is what a worker process itself does; it imports nothing heavy.
"""

import asyncio
import base64
import contextlib
import functools
import json
import os
import queue
import select
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from corral.child_process import (
    allowed_environment,
    describe_exit,
    die_with_parent,
    signal_group,
    start_child,
    terminate_group,
)
from corral.recipe.errors import UserError
from corral.rewards.concurrent_calls import LENGTH, CallMark, error_reply, framed

START_TIMEOUT_S = 120.0
"""Time for a process to import what it runs, and all that this imports."""
START_ATTEMPTS = 3
CLOSE_TIMEOUT_S = 5.0
MAX_READ_BYTES = 1 << 20
MAX_REPLY_BYTES = 64 << 20
"""Longest reply of a process that runs somebody's code."""
BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main(*map(int, sys.argv[2:]))"
)

BYTES_KEY = "bytes in base64"
"""The only key of an object that stands for bytes, which JSON does not have."""

Item = TypeVar("Item")
Job = TypeVar("Job")


class Inbox:
    """What arrives on a socket. Messages that arrive together are read with one call of the system."""

    def __init__(self, connection: socket.socket, max_bytes: int | None = None) -> None:
        """`max_bytes`: of a message, where the other side is not to be trusted."""
        self._connection, self._buffer, self._max_bytes = connection, bytearray(), max_bytes
        self.messages: deque[bytes] = deque()
        """Messages that have arrived whole."""

    def receive(self) -> bytes:
        """The next message. EOFError if the other side is gone."""
        while not self.messages:
            self.read()
        return self.messages.popleft()

    def read(self) -> None:
        """Wait for more of what is sent. ValueError if a message is too long."""
        chunk = self._connection.recv(MAX_READ_BYTES)
        if not chunk:
            raise EOFError
        self._buffer += chunk
        while len(self._buffer) >= LENGTH.size:
            end = LENGTH.size + int(LENGTH.unpack_from(self._buffer)[0])
            if self._max_bytes is not None and end > self._max_bytes:
                raise ValueError(f"a message of {end} bytes")
            if len(self._buffer) < end:
                return
            self.messages.append(bytes(self._buffer[LENGTH.size : end]))
            del self._buffer[:end]

    @property
    def is_empty(self) -> bool:
        return not self.messages and not self._buffer


class WorkerConnection:
    """The socket to a process that answers requests."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.setblocking(False)
        self._inbox, self._outbox = Inbox(connection, MAX_REPLY_BYTES), bytearray()

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
            self.exchange(deadline - time.monotonic())
        return self.read_reply()

    def read_reply(self) -> dict[str, Any]:
        """A reply that has arrived."""
        try:
            reply = json.loads(self._inbox.receive(), object_hook=decode_bytes)
        except RecursionError as error:
            raise ValueError("lists in lists without end") from error
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
            self.exchange(0)
        except TimeoutError:
            return self._inbox.is_empty
        except (EOFError, OSError, ValueError):
            pass
        return False

    def exchange(self, timeout_s: float, doorbell: "Doorbell | None" = None) -> None:
        """Wait until the process takes or sends something, or the doorbell rings; TimeoutError if nothing happens."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN | (select.POLLOUT if self._outbox else 0))
        if doorbell is not None:
            poll.register(doorbell.listening, select.POLLIN)
        events = dict(poll.poll(max(timeout_s, 0) * 1000))
        if not events:
            raise TimeoutError
        if doorbell is not None and events.pop(doorbell.listening.fileno(), 0):
            doorbell.hear()
        if events == {self._connection.fileno(): select.POLLOUT}:
            del self._outbox[: self._connection.send(self._outbox)]
        elif events:
            self._inbox.read()  # before anything else: what a process sent before it died is read


def encode_bytes(value: Any) -> dict[str, str]:
    """The object of JSON for bytes, such as an environment's pictures; the `default` of `json.dumps`."""
    if not isinstance(value, bytes):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return {BYTES_KEY: base64.b64encode(value).decode()}


def decode_bytes(value: dict[str, Any]) -> Any:
    """What `encode_bytes` was given; the `object_hook` of `json.loads`. Raises ValueError for what is no base64."""
    return base64.b64decode(str(value[BYTES_KEY]), validate=True) if value.keys() == {BYTES_KEY} else value


class WorkerProcess(WorkerConnection):
    """A process that runs a module's `main`, and the socket to it.

    Belongs to the thread that made it: Linux kills the process when that thread ends (see `die_with_parent`).
    """

    def __init__(
        self,
        module: str,
        mark: CallMark | None = None,
        variables: Iterable[str] = (),
        prints: Path | None = None,
    ) -> None:
        """`mark`: where a process with several calls at once says which of them computes. `variables`: names of
        environment variables that it gets besides those that are no secret. `prints`: file for what it prints; None:
        where this process prints its errors."""
        connection, theirs = socket.socketpair()
        super().__init__(connection)
        self.mark, self._variables, self._prints = mark, variables, prints
        with theirs:
            self._process = self._start(module, [theirs.fileno(), *([] if mark is None else [mark.descriptor])])

    def _start(self, module: str, descriptors: list[int]) -> "subprocess.Popen[bytes]":
        command, variables = worker_command(sys.executable, module, descriptors), allowed_environment(self._variables)
        with contextlib.nullcontext() if self._prints is None else self._prints.open("ab") as file:
            output: Any = 2 if file is None else file
            return start_child(command, pass_fds=descriptors, stdout=output, stderr=output, env=variables)

    def kill(self) -> None:
        signal_group(self._process.pid)

    def end(self) -> str:
        """Kill it with all that it has started, if it isn't dead; returns how it ended."""
        if self._process.returncode is None:
            terminate_group(self._process)
            self._connection.close()
            if self.mark is not None:
                self.mark.close()
        return describe_exit(self._process.returncode)


def worker_command(python: str, module: str, descriptors: Iterable[int]) -> list[str]:
    """The command that runs a module's `main` with these descriptors."""
    return [python, "-u", "-c", BOOTSTRAP.format(module=module), json.dumps(sys.path), *map(str, descriptors)]


class Doorbell:
    """Wakes threads that wait for a worker's replies, when there is more for the worker to do."""

    def __init__(self) -> None:
        self.listening, self._ringing = socket.socketpair()
        self.listening.setblocking(False)
        self._ringing.setblocking(False)

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # it is full of rings already, or closed
            self._ringing.send(b"!")

    def hear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # another thread was faster
            self.listening.recv(MAX_READ_BYTES)

    def close(self) -> None:
        self.listening.close()
        self._ringing.close()


class WorkerPool(ABC, Generic[Job]):
    """Threads that take jobs from one queue, each with a worker process of its own. They start with the first job.

    What waits for what: a thread waits for a job (unblocked by `close`), for a worker that loads (at most
    START_TIMEOUT_S), or for a reply to a job (with the subclass's deadline, and sooner if the worker dies or `close`
    kills it). When something is wrong with all workers, every job that waits or comes gets that error.

    `label` names what they run, for errors; `module` is that of their `main`; `load` is their first message;
    `variables` are names of environment variables that they get besides those that are no secret; `prints` is a file
    for what they print.
    """

    thread_name = "worker"

    def __init__(
        self,
        label: str,
        module: str,
        load: bytes,
        num_workers: int,
        variables: Iterable[str] = (),
        prints: Path | None = None,
    ) -> None:
        self.label, self.module, self.load, self.num_workers = label, module, load, num_workers
        self.variables, self.prints = tuple(variables), prints
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._alive: set[WorkerProcess] = set()
        self._loaded: Future[dict[str, Any]] = Future()
        """What the first worker reported about what it has loaded."""
        self._unusable: Exception | None = None
        """Why no more jobs are taken."""
        self._lock = threading.RLock()

    @abstractmethod
    def _serve_job(self, worker: WorkerProcess, job: Job) -> WorkerProcess:
        """Do a job; returns the worker for the next one."""

    def _make_process(self) -> WorkerProcess:
        return WorkerProcess(self.module, variables=self.variables, prints=self.prints)

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
                worker = self._make_process()
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
                    self._loaded.set_result(reply)
            return worker
        where = "" if self.prints is None else f"; what it printed is in {self.prints}"
        raise UserError(f"{self.label}: its process died {START_ATTEMPTS} times while loading it: it {ended}{where}")

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
        """Refuse all jobs that wait and that come, with this error, and end all threads."""
        with self._lock:
            self._unusable = self._unusable or error
            for job in drained(self._jobs):
                self._fail(job, error)
            for _ in self._threads:  # again each time: what was put before is drained, too
                self._jobs.put(None)
            if not self._loaded.done():
                self._loaded.set_exception(error)


def drained(items: "queue.SimpleQueue[Item | None]") -> Iterator[Item]:
    """Everything that is in the queue now."""
    with contextlib.suppress(queue.Empty):
        while True:
            item = items.get_nowait()
            if item is not None:
                yield item


# --- inside a worker process. It holds no state that matters


@dataclass(frozen=True)
class Served:
    """What a worker process has loaded."""

    answer: Callable[[bytes], dict[str, Any]]
    """Answers one request after the other."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the pool is to know about it."""
    serve: Callable[[socket.socket], Coroutine[Any, Any, None]] | None = None
    """Answers all requests in an event loop, in place of `answer`."""


def serve_requests(descriptor: int, load: Callable[[bytes], Served]) -> None:
    """The loop of a worker process with the pool at the other end of the socket `descriptor`. `load` takes the first
    message and returns what answers the others."""
    die_with_parent()
    sys.breakpointhook = _no_terminal
    os.set_inheritable(descriptor, False)  # not for programs that the user's code starts
    connection = socket.socket(fileno=descriptor)
    inbox = Inbox(connection)

    def send(answer: Callable[[], dict[str, Any]]) -> None:
        try:
            reply = json.dumps(answer(), default=encode_bytes)
        except BaseException as error:  # also SystemExit: this request failed, the worker is well
            reply = json.dumps(error_reply(error))
        connection.sendall(framed(reply.encode()))

    try:
        try:
            served = load(inbox.receive())
        except (UserError, SystemExit) as error:
            unusable = str(error)
            return send(lambda: {"unusable": unusable})
        send(lambda: {"ready": True, **served.facts})
        if served.serve is not None:
            return asyncio.run(served.serve(connection))
        while True:
            request = inbox.receive()
            send(functools.partial(served.answer, request))
    except (EOFError, ConnectionError):
        return  # the pool is closed, or its process is gone


def _no_terminal(*_: Any, **__: Any) -> None:
    if os.environ.get("PYTHONBREAKPOINT") != "0":
        raise RuntimeError("code in a process of its own has no terminal for breakpoint(); `corral train --debug` has")
