"""Worker processes that run somebody's code (reward functions, blocking environments) and may be killed at any moment.

`WorkerProcess` is one process and the socket to it, as its parent sees it. `WorkerPool` is a number of threads, each
with such a process, that take jobs from one queue. Threads rather than asyncio, because the event loop may stand still
for seconds while a model computes; the deadlines here go on all the same, and a pool can be used from one event loop
after another.

Messages are a length, then bytes. Requests are pickled (we send them to ourselves); replies are JSON, since what runs
in a worker is not ours. At the end of the file is what a worker process itself does with its socket.
"""

import contextlib
import functools
import json
import os
import queue
import select
import socket
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from corral.child_process import describe_exit, die_with_parent, signal_group, start_child, terminate_group
from corral.data.plugins import error_line
from corral.recipe.errors import UserError

START_TIMEOUT_S = 120.0
"""Time for a process to import what it runs, and all that this imports."""
START_ATTEMPTS = 3
CLOSE_TIMEOUT_S = 5.0
MAX_READ_BYTES = 1 << 20
LENGTH = struct.Struct(">I")
BOOTSTRAP = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main(int(sys.argv[2]))"

Item = TypeVar("Item")
Job = TypeVar("Job")


class Inbox:
    """What arrives on a socket. Messages that arrive together are read with one call of the system."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._buffer = connection, bytearray()

    def receive(self) -> bytes:
        """The next message. EOFError if the other side is gone; TimeoutError after the socket's timeout."""
        while not self.has_message:
            self.read()
        end = self._end_of_first()
        message = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        return message

    def read(self) -> None:
        """Wait for more of what is sent."""
        chunk = self._connection.recv(MAX_READ_BYTES)
        if not chunk:
            raise EOFError
        self._buffer += chunk

    @property
    def has_message(self) -> bool:
        return len(self._buffer) >= LENGTH.size and len(self._buffer) >= self._end_of_first()

    @property
    def is_empty(self) -> bool:
        return not self._buffer

    def _end_of_first(self) -> int:
        return LENGTH.size + int(LENGTH.unpack_from(self._buffer)[0])


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
        while not self._inbox.has_message:
            self._exchange(deadline - time.monotonic())
        reply = json.loads(self._inbox.receive())
        if not isinstance(reply, dict):
            raise ValueError("not a reply")
        return reply

    @property
    def has_reply(self) -> bool:
        """Whether `next_reply` would return at once."""
        return self._inbox.has_message

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


def drained(items: "queue.SimpleQueue[Item | None]") -> Iterator[Item]:
    """Everything that is in the queue now."""
    with contextlib.suppress(queue.Empty):
        while True:
            item = items.get_nowait()
            if item is not None:
                yield item


# --- inside a worker process


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
