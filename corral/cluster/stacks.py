"""What every process of Corral is doing right now, on this node or on all nodes of a cluster: `corral stacks`.

py-spy reads the Python stacks of a process from outside, so it does not matter whether that process hangs. Controllers
and workers describe themselves in a file (`runtime/presence.py`), reward functions are known by their command line.
Reading a process, and waiting for a node, have a timeout.
"""

import json
import os
import shutil
import socket
import subprocess
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import corral
from corral.cluster.node_processes import all_processes, user_name
from corral.recipe.errors import UserError, install_command
from corral.recipe.placement import format_devices
from corral.runtime.presence import present

PROCESS_S = 15.0  # for py-spy to read one process
NODE_S = 60.0  # for a node to answer
NUM_THREADS = 4
ProcessKind = Literal["controller", "worker", "reward", "environment"]
MARKS: dict[ProcessKind, str] = {
    "reward": "from corral.rewards.scorer_pool import main",
    "environment": "from corral.envs.env_processes import main",
}
"""Parts of the command line of a process that runs a reward function, or environments that block."""
BACKGROUND = {
    "WorkerHeartbeat._beat",
    "Heartbeats._ask_nodes",
    "Heartbeats._ask_ray",
    "Heartbeats._watch_raylet",
    "DebuggerWatch._look",
    "TrackerThread._run",
    "PrometheusServer._serve",
    "Console._report_silence",
    "DeferredWrites._copy",
}
"""Functions of threads that look after a run: their position says least about it."""
IDLE = {"WorkerPool._serve", "EnvSlot.next_call", *BACKGROUND}
"""Functions in which a thread waits for work."""
NO_PERMISSION = (
    "no permission to look into it. Be the same user, or root; in a container, start that with --cap-add SYS_PTRACE "
    "(Kubernetes: securityContext.capabilities.add: [SYS_PTRACE]); else `sysctl kernel.yama.ptrace_scope=0` on the node"
)
OWN = Path(corral.__file__).parent
LIBRARIES = sorted({sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")}, key=len)[::-1]
"""Innermost first: one may be in another, and the same file must have one name on all nodes."""


@dataclass(frozen=True)
class StackFrame:
    function: str
    file: str  # relative to Corral's folder, or to the one in which libraries are installed
    line: int
    is_own: bool  # Corral's or the user's

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True)
class ThreadStack:
    thread: str
    is_active: bool  # computes; else it waits
    frames: tuple[StackFrame, ...]  # innermost first

    @property
    def own(self) -> StackFrame | None:
        """The innermost frame that is Corral's or the user's."""
        return next((frame for frame in self.frames if frame.is_own), None)

    @property
    def is_idle(self) -> bool:
        return self.own is None or self.own.function in IDLE

    @property
    def sort_key(self) -> tuple[bool, bool, bool]:
        """Sorts the threads that say most about a process first; an event loop waits for whatever comes next."""
        is_background = any(frame.function in BACKGROUND for frame in self.frames)
        is_event_loop = not self.is_active and bool(self.frames) and self.frames[0].file == "selectors.py"
        return is_background, not self.is_active, is_event_loop


@dataclass(frozen=True)
class ProcessStacks:
    node: str
    pid: int
    kind: ProcessKind
    run: str
    device: int | None
    roles: tuple[str, ...]
    stacks: tuple[ThreadStack, ...] = ()
    problem: str | None = None  # why there are no stacks
    folder: str = ""  # of its run

    @property
    def shown(self) -> tuple[ThreadStack, ...]:
        """Stacks of the threads that do not wait for work; what says most comes first."""
        return tuple(sorted((one for one in self.stacks if not one.is_idle), key=lambda stack: stack.sort_key))

    @property
    def doing(self) -> str:
        """The process in one line."""
        if self.problem is not None:
            return self.problem
        if not self.shown:
            return "waits for work"
        first = self.shown[0]
        return f"{first.own}" if first.is_active else f"{first.own}, waits"

    def as_dict(self) -> dict[str, Any]:
        threads = [
            {"name": stack.thread, "active": stack.is_active, "frames": [str(frame) for frame in stack.frames]}
            for stack in self.stacks
        ]
        about = {"node": self.node, "pid": self.pid, "kind": self.kind, "run": self.run}
        about |= {"device": self.device, "roles": list(self.roles), "doing": self.doing, "problem": self.problem}
        return {**about, "threads": threads}


def stacks_here(native: bool = False) -> list[ProcessStacks]:
    """Stacks of all processes of Corral on this node that are this user's."""
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        return list(threads.map(lambda process: read_stacks(process, native), find_processes()))


def find_processes() -> list[ProcessStacks]:
    node = socket.gethostname()
    found = {
        one.pid: ProcessStacks(node, one.pid, one.kind, one.run, one.device, one.roles, folder=one.folder)
        for one in present()
    }
    for process in all_processes().values():
        for kind, mark in MARKS.items():
            if mark in process.command and process.user == user_name(os.getuid()):
                parent = found.get(process.parent) or ProcessStacks(node, process.pid, kind, "", None, ())
                found[process.pid] = replace(parent, pid=process.pid, kind=kind, roles=())
    return list(found.values())


def read_stacks(process: ProcessStacks, native: bool) -> ProcessStacks:
    command = [find_py_spy(), "dump", "--json", *(["--native"] * native), "--pid", str(process.pid)]
    try:
        dump = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_S)
    except subprocess.TimeoutExpired:
        return replace(process, problem=f"py-spy could not read it within {PROCESS_S:g} s")
    if dump.returncode:
        return replace(process, problem=explain(dump.stderr))
    return replace(process, stacks=tuple(map(parse_stack, json.loads(dump.stdout))))


def find_py_spy() -> str:
    """Path of py-spy beside this Python, where `ray[default]` puts it, or on the PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "py-spy"
    found = str(beside) if beside.is_file() else shutil.which("py-spy")
    if found is None:
        raise UserError(f"`corral stacks` needs py-spy on {socket.gethostname()}: {install_command('debug')}")
    return found


def explain(errors: str) -> str:
    """py-spy's errors in a line."""
    if "ermission" in errors or "not permitted" in errors:
        return NO_PERMISSION
    lines = [line for line in errors.splitlines() if line.strip()]
    return f"py-spy: {lines[0].removeprefix('Error: ')}" if lines else "py-spy failed"


def parse_stack(thread: dict[str, Any]) -> ThreadStack:
    frames = [parse_frame(frame["name"], frame["filename"], frame["line"]) for frame in thread["frames"]]
    return ThreadStack(thread["thread_name"] or str(thread["os_thread_id"]), thread["active"], tuple(frames))


def parse_frame(function: str, file: str, line: int) -> StackFrame:
    path = Path(file)
    if path.is_relative_to(OWN):
        return StackFrame(function, str(path.relative_to(OWN)), line, True)
    library = next((folder for folder in LIBRARIES if path.is_relative_to(folder)), None)
    if library is not None:
        return StackFrame(function, str(path.relative_to(library)), line, False)
    return StackFrame(function, path.name, line, path.suffix == ".py" and "site-packages" not in path.parts)


class StackReader:
    """An actor on every node."""

    def read(self, native: bool) -> list[ProcessStacks]:
        return stacks_here(native)


def stacks_of_cluster(native: bool = False) -> tuple[list[ProcessStacks], list[str]]:
    """Stacks of all nodes of the cluster that this process is attached to, and why other nodes have none."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from corral.runtime.nodes import remote_class

    nodes = [entry for entry in ray.nodes() if entry["Alive"]]
    where = [NodeAffinitySchedulingStrategy(entry["NodeID"], soft=False) for entry in nodes]
    readers = [remote_class(StackReader, one).remote() for one in where]
    answers = [reader.read.remote(native) for reader in readers]
    ray.wait(answers, num_returns=len(answers), timeout=NODE_S)
    found, problems = list[ProcessStacks](), list[str]()
    for entry, answer in zip(nodes, answers, strict=True):
        name = f"{entry['NodeManagerHostname']} ({entry['NodeManagerAddress']})"
        try:
            found += ray.get(answer, timeout=0)
        except ray.exceptions.GetTimeoutError:
            problems.append(f"{name} did not answer within {NODE_S:g} s")
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            problems.append(f"{name}: {str(cause).strip().splitlines()[-1]}")
    return found, problems


def format_stacks(processes: Iterable[ProcessStacks]) -> str:
    """One block for each process, or for all that are alike in what they are and where they stand."""
    order = {"controller": 0, "worker": 1, "reward": 2, "environment": 3}
    ordered = sorted(
        processes, key=lambda one: (one.run, one.folder, order[one.kind], one.device or 0, one.node, one.pid)
    )
    blocks: dict[Any, list[ProcessStacks]] = {}
    for one in ordered:
        blocks.setdefault((one.run, one.folder, one.kind, one.roles, one.problem, one.shown), []).append(one)
    return "\n\n".join("\n".join(format_block(alike)) for alike in blocks.values())


def format_block(alike: Sequence[ProcessStacks]) -> Iterator[str]:
    first = alike[0]
    yield f"{format_title(alike)}: {first.doing}"
    by_node = groupby(sorted(alike, key=lambda one: one.node), key=lambda one: one.node)
    yield "    " + "; ".join(f"{node}, pid {', '.join(str(one.pid) for one in own)}" for node, own in by_node)
    for stack in first.shown:
        yield f"    {stack.thread}{' (active)' if stack.is_active else ''}"
        yield from (f"        {frame}" for frame in stack.frames)


def format_title(alike: Sequence[ProcessStacks]) -> str:
    first = alike[0]
    numbers = {one.device for one in alike if one.device is not None}
    devices = f"device{'s' * (len(numbers) > 1)} {format_devices(numbers)}"
    run = f" of run {first.run}" if first.run else ""
    same = f" ({len(alike)} alike)" if len(alike) > 1 else ""
    if first.kind == "worker":
        return f"{devices}, {'+'.join(first.roles)}{run}{same}"
    if first.kind in MARKS:
        what = "reward function" if first.kind == "reward" else "environments"
        return f"{what}{f' on {devices}' if numbers else ''}{run}{same}"
    return f"controller{run}{same}"
