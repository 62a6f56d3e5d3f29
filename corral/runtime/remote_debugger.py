"""A debugger in a worker's process, for someone who connects from elsewhere.

It is Ray's: debugpy, for editors, or the older one for `ray debug` where the node's Ray was started with
RAY_DEBUG=legacy. It opens at a `breakpoint()`, and after a failure where that was asked for. Until someone connects the
process waits. What waits is written into Ray's store, and the controller, which looks there, warns the user.

Neither asks for a password. So both listen on loopback, unless the user agrees that whoever reaches the node may run
anything in the user's name.
"""

import builtins
import importlib.util
import json
import os
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from corral.data.plugins import error_line
from corral.recipe.errors import UserError, install_command

if TYPE_CHECKING:
    from corral.runtime.nodes import Node

DebuggerKind = Literal["debugpy", "legacy"]
NAMESPACE = b"corral-debugger"
LOOPBACK = "127.0.0.1"
LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class DebuggerOptions:
    """What the user asked for."""

    post_mortem: bool = False
    """Whether a debugger opens where a worker fails."""
    insecure: bool = False
    """Whether it listens at the node's address."""
    warn: Callable[[str], None] = lambda message: None


def installed_debugger() -> DebuggerKind | None:
    """Returns which debugger the workers of this node have."""
    if os.environ.get("RAY_DEBUG") == "legacy":
        return "legacy"
    return "debugpy" if importlib.util.find_spec("debugpy") else None


def has_legacy_debugger() -> bool:
    """Whether the installed Ray still has the debugger of `ray debug`."""
    try:
        from ray.scripts.scripts import cli
        from ray.util import rpdb
    except ImportError:
        return False
    return "debug" in cli.commands and hasattr(rpdb, "_connect_ray_pdb")


def check_debugger(options: DebuggerOptions, nodes: Sequence["Node"]) -> None:
    """Raises a UserError where a debugger that was asked for cannot be opened."""
    if options.post_mortem and (lacking := [str(node) for node in nodes if node.facts.debugger is None]):
        raise UserError(f"--post-mortem on {', '.join(lacking)} {no_debugpy()}")
    if options.insecure:
        options.warn("--insecure: whoever reaches a worker's debugger, which has no password, can run anything as you")


def no_debugpy() -> str:
    return f"needs debugpy, which is not installed there: {install_command('debug')}"


# --- in the worker


@dataclass(frozen=True)
class WorkerDebugger:
    """The debugger of one worker."""

    token: str
    """Token of the run."""
    device: int
    kind: DebuggerKind | None
    post_mortem: bool
    host: str
    """Address at which debugpy listens. (That of the older one is set when the node is started.)"""

    def install(self) -> None:
        """Makes `breakpoint()` open it. Called again after each use: debugpy takes the hooks for itself."""
        sys.breakpointhook = sys.__breakpointhook__ = builtins.breakpoint = self.on_breakpoint

    def on_breakpoint(self, *_: Any, **__: Any) -> None:
        if self.kind is None:
            raise RuntimeError(
                f"breakpoint() in a worker {no_debugpy()}. With `corral train --debug` all is one process"
            )
        frame = sys._getframe(1)
        why = f"breakpoint() in {frame.f_code.co_name}, {frame.f_code.co_filename}:{frame.f_lineno}"
        if self.kind == "legacy":
            self._remote_pdb(why).set_trace(frame=frame)
        else:
            self._wait_for_client(why)
            import pydevd

            pydevd.settrace(stop_at_frame=frame)
        self.install()

    def open_at(self, error: Exception) -> None:
        """Opens it where the error was raised; returns when who has connected says so. Called in a thread of its own:
        the worker goes on answering."""
        try:
            raise error
        except Exception:
            if self.kind == "legacy":
                self._remote_pdb(error_line(error)).post_mortem()
            else:
                self._wait_for_client(error_line(error))
                from ray.util.debugpy import _debugpy_excepthook

                _debugpy_excepthook()  # stops at the error that is being handled, where it was raised

    def _wait_for_client(self, why: str) -> None:
        import debugpy
        import ray
        from ray.util.debugpy import debugger_port_lock

        worker = ray._private.worker.global_worker
        with debugger_port_lock:
            if not worker.debugger_port:
                worker.set_debugger_port(debugpy.listen((self.host, 0))[1])
            port = worker.debugger_port
        where = f"{self.host}:{port}"
        if self.host == LOOPBACK:
            where += f" of that node; `ssh -L {port}:{where} {socket.gethostname()}` brings it to another"
        with self._announced(f"waits for a debugger at {where} ({why})"), worker.worker_paused_by_debugger():
            debugpy.wait_for_client()

    def _remote_pdb(self, why: str) -> Any:
        """Returns Ray's older debugger, once someone has connected."""
        import ray
        from ray.util.rpdb import _connect_ray_pdb

        external = ray._private.worker.global_worker.ray_debugger_external
        where = "any node" if external else "that node"
        with self._announced(f"waits for `ray debug` on {where} ({why})"):
            return _connect_ray_pdb(debugger_external=external)

    @contextmanager
    def _announced(self, what: str) -> Iterator[None]:
        """Lets the controller know that someone is waited for, for the time of the block."""
        from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_put

        key = f"{self.token}/{uuid.uuid4().hex}"
        _internal_kv_put(key, json.dumps([self.device, what]), namespace=NAMESPACE)
        try:
            yield
        finally:
            _internal_kv_del(key, namespace=NAMESPACE)


# --- at the controller


class DebuggerWatch:
    """Warns the user of workers that wait for a debugger, each time once. `devices`: by number, as they are then: one
    may be on a node that has taken another's place."""

    def __init__(self, token: str, devices: Mapping[int, object], warn: Callable[[str], None]) -> None:
        self.token, self.devices, self.warn = token, devices, warn
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._look, name="debuggers", daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.closed.set()
        self.thread.join(2 * LOOK_EVERY_S)

    def _look(self) -> None:
        from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

        reported: set[bytes] = set()
        while not self.closed.wait(LOOK_EVERY_S):
            with suppress(Exception):  # where Ray's head is gone, which others report
                for key in set(_internal_kv_list(f"{self.token}/", namespace=NAMESPACE)) - reported:
                    if (value := _internal_kv_get(key, namespace=NAMESPACE)) is not None:
                        device, what = json.loads(value)
                        self.warn(f"{self.devices[device]} {what}")
                    reported.add(key)
