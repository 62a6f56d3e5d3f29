"""Kinds of faults, the processes of a run that they hit, on all nodes, and a random schedule of them."""

import os
import random
import resource
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from corral.cluster.node_processes import SERVERS, NodeProcess, ProcessTable, all_processes
from corral.cluster.stacks import MARKS
from corral.runtime.presence import present

DURING_RECOVERY = 0.15
"""Part of the faults that do not wait until the run has recovered from the one before."""


@dataclass(frozen=True)
class FaultKind:
    target: str
    signal: signal.Signals | None
    """None: no file of the process can grow for a while, as on a full disk; a node is cut off."""
    description: str


KINDS = {
    "kill-worker": FaultKind("worker", signal.SIGKILL, "the process of a device is killed"),
    "hang-worker": FaultKind("worker", signal.SIGSTOP, "the process of a device is stopped (SIGSTOP)"),
    "kill-reward": FaultKind("reward", signal.SIGKILL, "a process that runs the reward function is killed"),
    "kill-environment": FaultKind("environment", signal.SIGKILL, "a process of an environment or a tool is killed"),
    "kill-engine": FaultKind("engine", signal.SIGKILL, "the own process of an engine is killed"),
    "hang-engine": FaultKind("engine", signal.SIGSTOP, "the own process of an engine is stopped (SIGSTOP)"),
    "kill-agent": FaultKind("agent", signal.SIGKILL, "the agent of a node, which answers heartbeats, is killed"),
    "kill-raylet": FaultKind("raylet", signal.SIGKILL, "Ray's process of a node is killed"),
    "kill-gcs": FaultKind("gcs", signal.SIGKILL, "Ray's head process is killed"),
    "kill-controller": FaultKind("controller", signal.SIGKILL, "`corral train` is killed, and started again"),
    "stop-controller": FaultKind("controller", signal.SIGTERM, "`corral train` gets SIGTERM, and is started again"),
    "full-disk": FaultKind("controller", None, "no file of the controller and of workers on its node can grow"),
    "cut-off-node": FaultKind("node", None, "a node reaches no other for 30 s; needs root, and to be named"),
}
BY_DEFAULT = tuple(kind for kind in KINDS if kind != "cut-off-node")
"""Ray gives a node up that was cut off, and it has left the cluster until somebody brings it up again."""
CUT_OFF_S = 30.0
ENVIRONMENT_MARKS = (MARKS["environment"], "from corral.envs.tool_processes import main")
ENGINE_MARK = "corral.rollout.engine_process"


@dataclass(frozen=True)
class Target:
    """A process that a fault can hit."""

    kind: str
    pid: int
    name: str
    """What it is for the run: the process that takes its place has the same name."""
    node: str = ""
    """Ray's id of its node; empty: this one."""


def find_targets(run: str, controller: int | None, in_cluster: bool) -> list[Target]:
    """Processes of a run on this node that a fault can hit."""
    own = own_processes(run, controller, in_cluster)
    workers = {one.pid: one for one in present() if one.kind == "worker" and one.pid in own}
    found = [Target("controller", controller, "controller")] if controller is not None and controller in own else []
    found += [Target("worker", pid, f"device {one.device} ({'+'.join(one.roles)})") for pid, one in workers.items()]
    others = [process for pid, process in own.items() if pid not in workers]
    return found + [Target(kind, process.pid, kind) for process in others if (kind := kind_of(process)) is not None]


def own_processes(run: str, controller: int | None, in_cluster: bool) -> dict[int, NodeProcess]:
    """What the controller has started. In a cluster that was there before, also the workers of its run, which are
    known by the run's name; elsewhere another run on this machine may have the same name."""
    workers = {one.pid for one in present() if one.run == run and one.kind == "worker"} if in_cluster else set[int]()
    return descendants({*workers, controller}, all_processes())


def kind_of(process: NodeProcess) -> str | None:
    if process.name in ("raylet", "gcs_server"):
        return "raylet" if process.name == "raylet" else "gcs"
    if process.name.startswith("ray::NodeAgent"):
        return "agent"
    if MARKS["reward"] in process.command:
        return "reward"
    if any(mark in process.command for mark in ENVIRONMENT_MARKS):
        return "environment"
    return "engine" if ENGINE_MARK in process.command else None


def descendants(roots: Iterable[int | None], table: ProcessTable) -> dict[int, NodeProcess]:
    """The processes of a table that descend from `roots`, these included."""
    known = {pid: True for pid in roots if pid is not None}

    def is_own(pid: int) -> bool:
        if pid not in known:
            known[pid] = pid in table and is_own(table[pid].parent)
        return known[pid]

    return {pid: process for pid, process in table.items() if is_own(pid)}


class NodeFaults:
    """An actor on every node of a cluster."""

    def find(self, run: str) -> list[Target]:
        """The node itself is one, if something of the run is on it and routes can be changed."""
        found = find_targets(run, None, in_cluster=True)
        return [*found, Target("node", os.getpid(), socket.gethostname())] if found and may_change_routes() else found

    def cut_off(self, addresses: Sequence[str]) -> None:
        """Lets this node reach none of these addresses for a while: routes to them lead nowhere. Other routes, and
        connections to other machines, stay. The shell that takes them away again is nobody's child: Ray ends this actor
        meanwhile."""
        add, remove = ("".join(f"ip route {verb} blackhole {one}; " for one in addresses) for verb in ("add", "del"))
        script = f"(trap '{remove}' EXIT; trap exit HUP INT TERM; sleep 0.5; {add} sleep {CUT_OFF_S:g}) &"
        subprocess.run(["setsid", "sh", "-c", script], check=True, stdin=subprocess.DEVNULL)

    def signal(self, pid: int, number: signal.Signals) -> None:
        send_signal(pid, number)


def may_change_routes() -> bool:
    """Tried with an address of documentation: root of a container may lack the permission."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("setsid"):
        return False
    script = "ip route add blackhole 192.0.2.1 && ip route del blackhole 192.0.2.1"
    return subprocess.run(["sh", "-c", script], capture_output=True).returncode == 0


class Reach:
    """Finds processes of a run and sends signals to them: on this node, and on the others of a cluster that this
    process is attached to."""

    def __init__(self, in_cluster: bool) -> None:
        self.in_cluster, self.actors = in_cluster, dict[str, Any]()
        if in_cluster:
            import ray
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            from corral.runtime.nodes import HEAD_RESOURCE, remote_class

            here, alive = ray.get_runtime_context().get_node_id(), [one for one in ray.nodes() if one["Alive"]]
            self.addresses = {entry["NodeID"]: entry["NodeManagerAddress"] for entry in alive}
            heads = [one["NodeID"] for one in alive if HEAD_RESOURCE in one["Resources"]]
            kept = {self.addresses[node] for node in (here, *heads)}
            self.uncut = {node for node, address in self.addresses.items() if address not in kept}
            where = {node: NodeAffinitySchedulingStrategy(node, soft=False) for node in self.addresses if node != here}
            self.actors = {node: remote_class(NodeFaults, one).remote() for node, one in where.items()}

    def find(self, run: str, controller: int) -> list[Target]:
        found = find_targets(run, controller, self.in_cluster)
        for node, actor in self.actors.items():
            own = [replace(target, node=node) for target in self._ask(actor.find.remote(run)) or ()]
            found += [target for target in own if target.kind != "node" or node in self.uncut]
        return found

    def cut_off(self, target: Target) -> None:
        self.uncut.remove(target.node)
        others = [address for node, address in self.addresses.items() if node != target.node]
        self._ask(self.actors[target.node].cut_off.remote(others))

    def signal(self, target: Target, number: signal.Signals) -> None:
        if target.node:
            self._ask(self.actors[target.node].signal.remote(target.pid, number))
        else:
            send_signal(target.pid, number)

    def _ask(self, reference: Any) -> Any:
        """A node that does not answer has nothing to hit."""
        import ray

        with suppress(ray.exceptions.RayError):
            return ray.get(reference, timeout=10.0)


def send_signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def limit_files(processes: Iterable[NodeProcess], num_bytes: int) -> None:
    """Lets no file of these processes grow beyond so many bytes; -1: no limit. Python ignores the signal that comes
    with it, so a write fails as it does on a full disk. Ray's servers would end with it, and are left out."""
    for process in (one for one in processes if one.name not in SERVERS):
        with suppress(OSError, ValueError):
            hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard if num_bytes < 0 else num_bytes, hard))


# --- the schedule


@dataclass(frozen=True)
class PlannedFault:
    kind: str
    delay_s: float
    """Seconds after the run has recovered from the fault before, or after that fault itself."""
    choice: float
    """Which of the processes that it could hit, from 0 to 1."""
    during_recovery: bool


def make_schedule(num_faults: int, seed: int, kinds: Sequence[str], interval_s: float) -> list[PlannedFault]:
    """The same for the same seed and kinds. Kinds are equally frequent, in random order."""
    chance, order = random.Random(seed), list[str]()
    while len(order) < num_faults:
        order += chance.sample(kinds, len(kinds))
    return [
        PlannedFault(kind, chance.uniform(0, 2 * interval_s), chance.random(), chance.random() < DURING_RECOVERY)
        for kind in order[:num_faults]
    ]
