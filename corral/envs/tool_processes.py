"""Tools run in processes that are locked in, have limits, and are killed when a call is late; agents that are functions
run in processes of the same kind, neither locked in nor limited.

A model writes the arguments of tools, so a call may compute for ever, read what it should not, or crash. One process,
the template, imports the tools once, within a sandbox (`rewards/sandbox_init.py`), and forks the processes that run
them: one for each trajectory with a session, and some for functions, which are used again: up to `num_processes` for
plain ones, and up to WAITING_PROCESSES for `async` ones, which wait for somebody else. A fork takes about a
millisecond, where a Python that imports the tools takes a good part of a second.

What waits for what: a call waits for a free process (of functions: each is free again within the deadline of its call),
then for its reply, within its deadline. Forks and ends are done one after the other by the thread that started the
template, since Linux kills a process with the thread that started it.
"""

import asyncio
import functools
import gc
import inspect
import json
import math
import os
import pickle
import queue
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

from corral.child_process import allowed_environment, describe_exit, start_child, with_kept_variable
from corral.data.plugins import adopt, error_line, load_object, portable
from corral.data.rows import Row
from corral.envs.tool_calls import is_json
from corral.recipe.errors import UserError
from corral.rewards.code import (
    NEEDED,
    READABLE,
    NotContained,
    SandboxLimits,
    raise_if_not_contained,
    start_sandbox,
)
from corral.rewards.reward_function import is_number
from corral.rewards.worker_pool import (
    START_TIMEOUT_S,
    Served,
    WorkerConnection,
    WorkerProcess,
    serve_requests,
    worker_command,
)

SETTING = "environment.options.tools"
NETWORK_FILES = ("/etc", "/run/systemd/resolve")
"""What looking up a name and checking a certificate read."""
MAX_PROCESSES = 4096
"""Processes and threads of all tools together."""
WAITING_PROCESSES = 256
"""Processes of `async` functions, each with one call at a time, so that one that computes holds up no other and can be
killed alone. They cost 2 MB each."""
HOME = "/sandbox"
REPLY_S = 10.0
"""Time for the template to fork or end processes, which takes milliseconds. Afterwards it is ended with all of them: a
tool has stopped it."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class ToolLimits:
    """What the processes of tools may do and use."""

    sandbox: bool
    network: bool
    readable: tuple[str, ...]
    """Folders that they see, besides those of the program and the tools."""
    memory_mb: int | None
    """None: processes have no limits, as those of agents, whose code is the user's and whose work is their own."""
    disk_mb: int
    env: tuple[str, ...]
    """Names of environment variables that they get."""

    def __post_init__(self) -> None:
        for path in self.readable:
            if not os.path.isdir(os.path.expanduser(path)):
                raise UserError(f"environment.options.readable: {path} is not a folder")

    def resources(self) -> dict[str, int]:
        """Limits of each process, of which the kernel knows. Not of time, of which each call has its own."""
        if self.memory_mb is None:
            return {}
        limits = SandboxLimits(math.inf, 0, self.memory_mb, MAX_PROCESSES, self.disk_mb, open_files=256)
        without = ("RLIMIT_CPU",) if self.sandbox else ("RLIMIT_CPU", "RLIMIT_NPROC")  # counts all of the user's there
        return {name: value for name, value in limits.settings()["limits"].items() if name not in without}


class ToolFailed(Exception):
    """A call that raised, or whose process died."""


class ToolProcess(WorkerConnection):
    """A process that the template has forked."""

    def __init__(self, connection: socket.socket, pid: int, end: Callable[[int], "Future[int]"]) -> None:
        """`pid`: its process id within the sandbox. `end`: kills it; the future is its exit code."""
        super().__init__(connection)
        self._pid, self._end = pid, end
        self.has_ended = False

    def request(self, timeout_s: float, method: str, *values: Any) -> Any:
        """What the method of `ToolServer` returns. TimeoutError, after which the process is gone; or ToolFailed."""
        if self.has_ended:
            raise ToolFailed("the session has ended with an earlier call that was too late or crashed")
        try:
            request = pickle.dumps((timeout_s, method, values))
        except Exception as error:
            raise ToolFailed(f"the row can't be sent to another process: {error_line(error)}") from error
        try:
            reply = self.ask(request, timeout_s)
        except TimeoutError:
            self._begin_end()  # the call's time is over, and not spent on a template that a tool has stopped
            raise
        except (EOFError, OSError, ValueError):
            raise ToolFailed(f"its process died: it {self.end()}") from None
        if "error" in reply:
            raise ToolFailed(with_kept_variable(str(reply["error"])))
        return reply.get("result")

    def end(self) -> str:
        """Kills it with all that it has started; returns how it ended."""
        return "has ended before" if self.has_ended else describe_exit(self._begin_end().result())

    def _begin_end(self) -> "Future[int]":
        self.has_ended = True
        self._connection.close()
        return self._end(self._pid)

    def kill(self) -> None:
        """Kills it from another thread than the one that waits for its reply, which then ends it."""
        self._end(self._pid)


class ToolProcesses:
    """Makes processes that run the tools, and calls functions in them."""

    def __init__(
        self, specs: Sequence[str], limits: ToolLimits, num_processes: int = 1, setting: str = SETTING
    ) -> None:
        """`setting`: the key of the recipe that names them."""
        self._limits, self._specs, self._setting = limits, specs, setting
        self._load = pickle.dumps((limits.resources(), [portable(spec) for spec in specs], setting))
        self._idle: list[ToolProcess] = []
        self._free = threading.Semaphore(num_processes)
        self._free_to_wait = threading.Semaphore(max(num_processes, WAITING_PROCESSES))
        self._thread = CallThread("tool processes")
        self._template: ToolTemplate | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="corral-tools-"))
        try:
            self._thread.submit(self._start).result()
        except BaseException:
            self.close()
            raise

    def call(self, place: int, arguments: Mapping[str, Any], timeout_s: float, *, waits: bool = False) -> str:
        """Calls a function in a process that is free. TimeoutError or ToolFailed if it does not return. `waits`: it is
        `async`, so many of its calls may run at a time."""
        with self._free_to_wait if waits else self._free:
            process = self._idle_process() or self.fork()
            try:
                return str(process.request(timeout_s, "call", place, None, dict(arguments)))
            finally:
                if not process.has_ended:
                    self._idle.append(process)

    def _idle_process(self) -> ToolProcess | None:
        """A process that can be used again. Those that died after their last call are ended."""
        with suppress(IndexError):
            while not (process := self._idle.pop()).is_idle():
                process.end()
            return process
        return None

    def fork(self) -> ToolProcess:
        return self._thread.submit(self._fork).result()

    async def fork_async(self) -> ToolProcess:
        """Forks while the event loop goes on. Where it is cancelled, the process ends as soon as it is there."""
        forking = call_in_thread(self.fork, "tool process")
        try:
            return await asyncio.wrap_future(forking)
        except asyncio.CancelledError:
            forking.add_done_callback(end_forked)
            raise

    def close(self) -> None:
        """Ends all processes."""

        def end() -> None:
            if self._template is not None:
                # One by one, with all that each has started: without a sandbox that would outlive the template.
                with suppress(TimeoutError, EOFError, OSError, ValueError):
                    self._template.ask(json.dumps(["end all", 0]).encode(), REPLY_S)
                self._template.end()

        self._thread.submit(end).result()
        self._thread.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- in the thread of the template

    def _start(self) -> "ToolTemplate":
        template = self._template = ToolTemplate(self._specs, self._limits, self._folder)
        try:
            reply = template.ask(self._load, START_TIMEOUT_S)
        except TimeoutError as error:
            raise UserError(f"{self._setting}: importing took longer than {START_TIMEOUT_S:g} s") from error
        except (EOFError, OSError, ValueError) as error:
            ended = template.end()
            template.check_contained()
            raise UserError(f"{self._setting}: the process that imports it died: it {ended}") from error
        if "unusable" in reply:
            where = " (in the sandbox, which `environment.options.readable` lets see more)" * self._limits.sandbox
            raise UserError(f"{with_kept_variable(reply['unusable'])}{where}")
        return template

    def _fork(self) -> ToolProcess:
        try:
            return self._fork_once()
        except TimeoutError:  # a second one would hold up all others for as long again
            raise
        except (EOFError, OSError, ValueError):  # it died before it answered, as with a dying template
            return self._fork_once()

    def _fork_once(self) -> ToolProcess:
        assert self._template is not None
        connection, theirs = socket.socketpair()
        with theirs:
            try:
                pid = self._template.fork(theirs)
            except (EOFError, OSError, ValueError):  # a tool has killed it, or the kernel
                self._template.end()
                self._idle.clear()  # they have ended with it
                pid = self._start().fork(theirs)
        # A later template may give the same process id to another trajectory's process.
        process = ToolProcess(connection, pid, functools.partial(self._end_from_elsewhere, self._template))
        try:
            process.ask(b"", START_TIMEOUT_S)
        except BaseException:
            self._end(self._template, pid)
            raise
        return process

    def _end_from_elsewhere(self, template: "ToolTemplate", pid: int) -> "Future[int]":
        try:
            return self._thread.submit(lambda: self._end(template, pid))
        except RuntimeError:  # closed, and so it has ended
            ended: Future[int] = Future()
            ended.set_result(-int(signal.SIGKILL))
            return ended

    def _end(self, template: "ToolTemplate", pid: int) -> int:
        try:
            return int(template.ask(json.dumps(["end", pid]).encode(), REPLY_S)["code"])
        except (EOFError, OSError, ValueError, KeyError):
            template.end()  # with all its processes
            return -int(signal.SIGKILL)


def end_forked(forking: "Future[ToolProcess]") -> None:
    """Ends a process that nobody wants any more."""
    if not forking.cancelled() and forking.exception() is None:
        forking.result().end()


class ToolTemplate(WorkerProcess):
    """The process that has imported the tools and forks those that run them."""

    def __init__(self, specs: Sequence[str], limits: ToolLimits, folder: Path) -> None:
        self._specs, self._limits, self._folder = specs, limits, folder
        self._handing, self._their_handing = socket.socketpair()
        self._reason: IO[bytes] | None = None
        with self._their_handing:
            super().__init__(__name__)

    def fork(self, connection: socket.socket) -> int:
        """Forks a process with this connection; returns its process id within the sandbox. ToolFailed if there is no
        room for it."""
        socket.send_fds(self._handing, [b"!"], [connection.fileno()])
        reply = self.ask(json.dumps(["fork", 0]).encode(), REPLY_S)
        if "error" in reply:
            raise ToolFailed(f"no process for it: {reply['error']}")
        return int(reply["pid"])

    def check_contained(self) -> None:
        """UserError if it died because it could not be locked in."""
        try:
            if self._reason is not None:
                raise_if_not_contained(self._reason)
        except NotContained as error:
            raise UserError(
                f"{error}. The sandbox of `tools` {NEEDED}. `environment.options.sandbox: false` runs tools in "
                "processes that see all of your files and the network"
            ) from error

    def _start(self, module: str, descriptors: list[int]) -> "subprocess.Popen[bytes]":
        descriptors = [*descriptors, self._their_handing.fileno()]
        command = worker_command(sys.executable, module, descriptors)
        environment = {**allowed_environment(self._limits.env), "OMP_NUM_THREADS": "1"}
        if not self._limits.sandbox:
            environment["TMPDIR"] = str(self._folder)
            return start_child(command, pass_fds=descriptors, stdout=2, env=environment)
        if sys.platform != "linux":
            raise UserError(
                "tools are locked in with namespaces of Linux, which this system does not have; "
                "`environment.options.sandbox: false` runs them without"
            )
        folder = os.getcwd()
        network = NETWORK_FILES if self._limits.network else ()
        named = [os.path.abspath(os.path.expanduser(path)) for path in self._limits.readable]
        own = [sys.base_prefix, sys.prefix, folder, *sys.path, *map(os.path.dirname, tool_files(self._specs))]
        settings = {
            "limits": self._limits.resources(),
            "disk_bytes": self._limits.disk_mb << 20,
            "root": str(self._folder),
            "folder": HOME if folder == "/" else folder,
            "files": {},
            "user": os.getuid(),
            "network": self._limits.network,
            "readable": sorted({*READABLE, *network, *named, *with_real_paths(own)}),  # parents before what is in them
            "command": command,
            "environment": {**environment, "HOME": HOME, "TMPDIR": HOME},
        }
        process, head, self._reason = start_sandbox(settings, 2, None, descriptors)
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(head)
        return process


def tool_files(specs: Iterable[str]) -> list[str]:
    locations = (spec.rpartition(":")[0] for spec in specs)
    return [os.path.abspath(os.path.expanduser(location)) for location in locations if location.endswith(".py")]


def with_real_paths(paths: Iterable[str]) -> set[str]:
    """Folders with those that links on their paths lead to; never the root."""
    whole = [os.path.abspath(path) for path in paths if path]
    return {path for one in whole for path in (one, os.path.realpath(one)) if path != "/"}


def as_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False) if is_json(result) else str(result)


# --- threads for calls that block. All are daemons, so that none keeps a run alive


class CallThread:
    """Runs one call after the other, all in the same thread."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock, self._is_closed = threading.Lock(), False
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def submit(self, call: Callable[[], Answer]) -> "Future[Answer]":
        """RuntimeError if it is closed."""
        future: Future[Answer] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the processes of tools are closed")
            self._jobs.put((future, call))
        return future

    def close(self) -> None:
        """The thread ends after what it was given so far."""
        with self._lock:
            self._is_closed = True
            self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                answer = call()
            except BaseException as error:  # also SystemExit: the call failed, nothing else
                future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            else:
                future.set_result(answer)


def call_in_thread(call: Callable[[], Answer], name: str) -> "Future[Answer]":
    """One call in a thread of its own. A pool's threads would be used up by calls that wait."""
    thread = CallThread(name)
    future = thread.submit(call)
    thread.close()
    return future


# --- inside the template, and inside the processes that it forks


def main(descriptor: int, handing: int) -> None:
    serve_requests(descriptor, lambda message: Served(Forks(message, descriptor, handing).answer))


class Forks:
    """Forks and ends processes."""

    def __init__(self, message: bytes, control: int, handing: int) -> None:
        os.set_inheritable(handing, False)
        self._control, self._handing = control, socket.socket(fileno=handing)
        limits, specs, setting = pickle.loads(message)
        for name, value in limits.items():
            resource.setrlimit(getattr(resource, name), (value, value))
        self._tools = [load_object(adopt(*spec), setting) for spec in specs]
        self._folders: dict[int, str] = {}
        gc.freeze()  # what is here stays shared with all forks

    def answer(self, request: bytes) -> dict[str, Any]:
        kind, pid = json.loads(request)
        if kind == "end all":
            return {"codes": [self._end(one) for one in list(self._folders)]}
        return self._fork() if kind == "fork" else self._end(pid)

    def _fork(self) -> dict[str, Any]:
        _, [descriptor], _, _ = socket.recv_fds(self._handing, 1, 1)
        folder = None
        try:
            folder = tempfile.mkdtemp()
            pid = os.fork()
        except OSError as error:  # tools have used up the sandbox's files or processes
            os.close(descriptor)
            if folder is not None:
                os.rmdir(folder)
            raise OSError(error.errno, error.strerror) from None  # without the folder's random name
        if pid == 0:
            self._serve(descriptor, folder)
        os.close(descriptor)
        with suppress(OSError):
            os.setpgid(pid, pid)  # here too: it may be ended before it has done so itself
        self._folders[pid] = folder
        return {"pid": pid}

    def _serve(self, descriptor: int, folder: str) -> NoReturn:
        """What a forked process does. It must not reach what belongs to the template."""
        try:
            os.setpgid(0, 0)
            os.close(self._control)
            self._handing.close()
            os.environ["TMPDIR"] = tempfile.tempdir = folder
            serve_requests(descriptor, lambda _: Served(ToolServer(self._tools).answer))
        finally:
            os._exit(0)

    def _end(self, pid: int) -> dict[str, Any]:
        if pid not in self._folders:
            return {"code": -int(signal.SIGKILL)}  # it was ended before
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        shutil.rmtree(self._folders.pop(pid), ignore_errors=True)
        return {"code": os.waitstatus_to_exitcode(status)}


class ToolServer:
    """Calls functions, and methods of the objects of one trajectory."""

    def __init__(self, tools: Sequence[Any]) -> None:
        self._tools = tools
        self._objects: dict[int, Any] = {}
        self._runner = asyncio.Runner()
        """The event loop of `async` tools. It is the same for all calls, since clients of services belong to one, and
        it runs during calls only."""

    def answer(self, request: bytes) -> dict[str, Any]:
        timeout_s, method, values = pickle.loads(request)
        limit_cpu(timeout_s)
        try:
            return {"result": getattr(self, method)(*values)}
        except SystemExit as error:
            raise RuntimeError(f"it called sys.exit({error.code!r})") from error

    def open(self, place: int, arguments: dict[str, Row]) -> None:
        self._objects[place] = self._run(self._tools[place], arguments)

    def call(self, place: int, name: str | None, arguments: dict[str, Any]) -> str:
        """`name`: of a method. None: a function."""
        function = self._tools[place] if name is None else getattr(self._objects[place], name)
        return as_text(self._run(function, arguments))

    def run(self, place: int, arguments: dict[str, Any]) -> Any:
        """Runs an agent. Returns its result where that is a reward."""
        result = self._run(self._tools[place], arguments)
        is_reward = is_number(result) or (isinstance(result, Mapping) and "score" in result)
        return json.loads(json.dumps(result, default=float)) if is_reward else None

    def close(self, place: int) -> None:
        found = self._objects.pop(place, None)  # None: its constructor has failed
        if callable(getattr(found, "close", None)):
            self._run(found.close, {})

    def _run(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        result = function(**arguments)
        return self._runner.run(awaited(result)) if inspect.isawaitable(result) else result


async def awaited(result: Awaitable[Answer]) -> Answer:
    return await result


def limit_cpu(timeout_s: float) -> None:
    """Lets this process compute for as long as a call may take, and a second."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = math.ceil(used.ru_utime + used.ru_stime + timeout_s) + 1 if math.isfinite(timeout_s) else -1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
