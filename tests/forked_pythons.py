"""Processes that are forked: each needs seconds of a core to import torch, transformers and Corral, and the tests have
hundreds of them. They are xdist's, that run the tests; `corral` as a command; Ray's workers; and commands on hosts.

`start_server` starts a process that has imported all of that. Asked by `ForkedProcess`, it forks one with the asking
one's descriptors 0 to 2, environment, folder and namespaces (a host of `hosts.py` has its own). It also writes a
program that is called as Python is, and asks in the same way where it is to run a worker of Ray, one of xdist's,
`-m corral.cli.main`, or `-c` with a program that begins with FORKED; it ends as the forked one ends, which does not
outlive it, and passes signals on. All else is Python's as ever, also where no server is to be seen, as in containers.
Agents of nodes start workers with it where `ray_python` is on the import path.
"""

import atexit
import ctypes
import json
import multiprocessing
import os
import runpy
import select
import selectors
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

REPLY_S = 300.0
"""In a new environment the server compiles what it imports."""
RAY_PYTHON = str(Path(__file__).parent / "ray_python")
NAMESPACES = {"mnt": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000, "pid": 0x20000000, "net": 0x40000000}
COMMAND = "-m corral.cli.main"
XDIST = "-u -c import sys;exec(eval("
SERVE = "serve"
FORKED = "# forked"
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def prepare() -> socket.socket:
    """Writes the program. Returns what `serve` listens to."""
    folder = Path(tempfile.mkdtemp(prefix="corral-test-"))
    atexit.register(shutil.rmtree, folder)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen()
    python = shlex.quote(sys.executable)
    ask = f"{python} {shlex.quote(__file__)} {folder}/socket {python}"
    program = folder / "python"
    forked = f'*default_worker.py\\ *|"{COMMAND}"*|"{XDIST}"*|"-c {FORKED}"*'
    program.write_text(f'#!/bin/sh\ncase "$1 $2 $3" in {forked}) exec {ask} "$@" ;; esac\nexec {python} "$@"\n')
    program.chmod(0o755)
    os.environ["CORRAL_TEST_PYTHON"] = str(program)
    return listener


def start_server() -> None:
    """Once for all processes of the tests: those that are forked have its program in their environment."""
    if "CORRAL_TEST_PYTHON" in os.environ:
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # threads of a pool that was started before the fork would be missing after it
    with prepare() as listener:
        command = [sys.executable, __file__, SERVE, str(listener.fileno())]
        # It ends with this process, which keeps the other end of the pipe.
        global _server
        _server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])


_server: subprocess.Popen[bytes] | None = None


def path_without_forks() -> list[str]:
    """The import path of who starts real workers."""
    return [entry for entry in sys.path if entry != RAY_PYTHON]


def forking_python() -> str:
    """Path of that program; Python's own where there is none yet."""
    return os.environ.get("CORRAL_TEST_PYTHON", sys.executable)


# --- the server


def serve(listener: socket.socket, until_input_ends: bool = False) -> None:
    multiprocessing.current_process().daemon = False  # those that it forks may have children
    atexit._clear()  # what its parent does at its own end
    signals, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    clients = dict[int, socket.socket]()
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(signals, selectors.EVENT_READ)
        if until_input_ends:
            selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == 0:
                    os._exit(0)  # what it has forked ends with it
                elif key.fileobj is listener:
                    client = listener.accept()[0]
                    if pid := answer(client, [listener, selector, *clients.values()]):
                        clients[pid] = client
                        selector.register(client, selectors.EVENT_READ, pid)
                elif key.fileobj is signals:
                    os.read(signals, 4096)
                    for pid, code in ended_children():
                        with clients.pop(pid) as client, suppress(OSError):
                            if client.fileno() >= 0:
                                selector.unregister(client)
                            client.sendall(f"{code}\n".encode())
                elif key.data in clients:  # who asked for it was killed, or wants it no more
                    os.kill(key.data, signal.SIGKILL)
                    client = clients[key.data]
                    selector.unregister(client)
                    client.close()


def ended_children() -> list[tuple[int, int]]:
    ended = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def answer(client: socket.socket, not_its_own: list[Any]) -> int | None:
    """Process id of the forked one. None: who asked has gone before it has said for what."""
    descriptors: list[int] = []
    try:
        message, descriptors, _, _ = socket.recv_fds(client, 1 << 16, 3)
        while not message.endswith(b"\n"):
            if not (more := client.recv(1 << 16)):
                raise ConnectionResetError
            message += more
        pid = os.fork()
        if pid == 0:
            for other in not_its_own:
                other.close()
            run_worker(client, descriptors, **json.loads(message))
        return pid
    except ConnectionError:
        client.close()
        return None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def run_worker(
    client: socket.socket,
    descriptors: list[int],
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    path: list[str],
    is_command: bool = False,
) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        die_with_parent()
        asking = process_of(client)
        join_cpu_group(asking)
        enter_namespaces(client, asking)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not is_command:
            os.setpgid(0, 0)
        client.sendall(f"{os.getpid()}\n".encode())
        client.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv, sys.path[:] = arguments, path
        sys.stdin = os.fdopen(0, closefd=False)
        if " ".join(arguments).startswith(XDIST):
            arguments = arguments[1:]
        if " ".join(arguments[:2]) == COMMAND:
            sys.argv = ["corral", *arguments[2:]]
            run_corral()
        elif arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(arguments[1], {"__name__": "__main__"})
        else:
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_corral() -> None:
    from corral.cli.main import main

    main()


def process_of(client: socket.socket) -> int:
    pid: int = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))[0]
    return pid


def join_cpu_group(asking: int) -> None:
    """What it computes is counted with whom it works for, where tests are measured (`verdict.py`)."""
    for line in Path(f"/proc/{asking}/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if "cpuacct" in controllers.split(",") and "/corral-tests-" in group:
            Path(f"/sys/fs/cgroup/cpuacct{group}/cgroup.procs").write_text(str(os.getpid()))


def enter_namespaces(client: socket.socket, asking: int) -> None:
    """Goes where the client is. Only children are in another PID namespace, so one of them is the worker then."""
    links = {name: [os.readlink(f"/proc/{pid}/ns/{name}") for pid in (asking, "self")] for name in NAMESPACES}
    others = [name for name, (theirs, ours) in links.items() if theirs != ours]
    if not others:
        return
    if ctypes.CDLL(None, use_errno=True).setns(os.pidfd_open(asking), sum(NAMESPACES[name] for name in others)):
        raise OSError(ctypes.get_errno(), f"setns: {others}")
    if pid := os.fork():
        client.close()
        end_as(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    die_with_parent()


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def end_as(code: int) -> NoReturn:
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# --- who asks


class ForkedProcess:
    """A process that the server has forked for this one, and that does not outlive it."""

    def __init__(self, address: str, arguments: Sequence[str], descriptors: Sequence[int], **request: object) -> None:
        self.exitcode: int | None = None
        """Minus the signal's number, where that ended it."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(REPLY_S)
        self._socket.connect(address)
        message = json.dumps({"arguments": arguments, "environment": dict(os.environ), **request}).encode() + b"\n"
        sent = socket.send_fds(self._socket, [message], list(descriptors))
        self._socket.sendall(message[sent:])
        self._replies = self._socket.makefile()
        self.pid = int(self._replies.readline())

    def join(self, timeout_s: float | None = None) -> None:
        if self.exitcode is None and select.select([self._socket], [], [], timeout_s)[0]:
            self.exitcode = int(self._replies.readline() or 1)
            self._replies.close()
            self._socket.close()

    def is_alive(self) -> bool:
        self.join(0)
        return self.exitcode is None

    def kill(self) -> None:
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def main(address: str, python: str, *arguments: str) -> None:
    """The program: a process of its own, that stands for the forked one."""
    own = [os.getcwd() if arguments[0].startswith("-") else str(Path(arguments[0]).parent), *sys.path[1:]]
    try:
        process = ForkedProcess(address, arguments, [0, 1, 2], folder=os.getcwd(), path=own)
    except (ConnectionError, FileNotFoundError, PermissionError):  # in a container, or of another user
        os.execv(python, [python, *arguments])
    for number in PASSED_ON:
        signal.signal(number, lambda received, _: os.kill(process.pid, received))
    process.join()
    end_as(process.exitcode or 0)


if __name__ == "__main__":
    if sys.argv[1] == SERVE:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's is for those that it forks
        import command_preload  # noqa: F401

        serve(socket.socket(fileno=int(sys.argv[2])), until_input_ends=True)
    else:
        main(*sys.argv[1:])
