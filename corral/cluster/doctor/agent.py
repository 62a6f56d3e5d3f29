"""What the doctor asks of one node. On this node it is an object; on the others an actor, beside whatever runs there.

It imports no torch: what needs it is done by a probe, which can be killed.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from corral.cluster.addresses import own_addresses
from corral.cluster.doctor import shared
from corral.cluster.doctor.files import Named, digest_of, is_offline
from corral.cluster.doctor.findings import Finding
from corral.cluster.doctor.gpu import TorchFacts, check_gpus, check_torch, models_of
from corral.cluster.doctor.machine import (
    check_disks,
    check_limits,
    check_memory,
    check_shared_memory,
    disks,
    limits,
    memory,
    shared_memory,
)
from corral.cluster.doctor.network import (
    Listener,
    Target,
    check_interfaces,
    check_own_name,
    own_name,
    own_variables,
    split,
    try_targets,
)
from corral.cluster.doctor.probe import Probe, ProbeFailed
from corral.cluster.doctor.rewards import Trial, try_reward
from corral.cluster.doctor.security import OpenPort, check_token_files, open_ports, token_files
from corral.cluster.doctor.software import own_versions
from corral.cluster.doctor.strays import check_processes
from corral.cluster.processes import Process, Table, all_processes, head_of, raylet_of
from corral.cluster.smi import Gpu, ask_tools, has_devices
from corral.data.plugins import error_line
from corral.data.rows import Row
from corral.recipe.schema import Environment
from corral.runtime.membership import find_membership, own_memberships
from corral.runtime.network import INTERFACE_VARIABLES, answers, interface_towards

WORKER = "DeviceProcess"
"""Ray calls a worker by the name of its class, `runtime.process.DeviceProcess`."""
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Question:
    """What a node is to look at."""

    cluster: str | None
    """host:port of its head; None: there is none."""
    address: str
    """Of the node itself, as the others reach it."""
    folder: str
    """In which the doctor was called; a run would be started there."""
    runs: str
    """Folder of the runs."""
    writes: int
    """Bytes that a run will write there."""
    objects: int | None
    """Bytes that Ray's object store may take, where it runs."""
    environment: Mapping[str, str]
    """Interface variables of the process that asks, which a run would hand on."""
    limit_s: float
    """For torch to be imported and to find its devices."""


@dataclass(frozen=True)
class Examined:
    """What the node found, and what has to be compared with others."""

    findings: tuple[Finding, ...]
    versions: Mapping[str, str]
    variables: Mapping[str, str]
    interface: str
    """That gloo and NCCL would use."""
    ports: tuple[OpenPort, ...]
    gpus: tuple[Gpu, ...]
    torch: TorchFacts
    memory: int
    offline: bool
    """No downloads from the hub."""
    port: int
    """On which it listens for the others."""
    is_busy: bool
    """A run of this cluster is on the node."""


class Agent:
    """Each method is one thing that a node is asked. What goes wrong with others comes back as text."""

    def __init__(self, question: Question) -> None:
        self.question = question
        if os.path.isdir(question.folder):
            os.chdir(question.folder)
            if question.folder not in sys.path:
                sys.path.append(question.folder)
        self.interface = self._interface()
        self.probes: dict[int, Probe] = {}
        self._probe(0).start()
        self.listener = Listener(question.address, f"corral {question.address}") if question.cluster else None

    def clock(self) -> float:
        return time.time()

    # --- alone

    def examine(self) -> Examined:
        question, table, tools = self.question, all_processes(), ask_tools()
        torch = self._torch()
        gpus = tools.gpus if tools is not None else ()
        raylet = next(
            (one for one in table.values() if one.name == "raylet" and head_of(one) == question.cluster), None
        )
        checks: dict[str, Callable[[], Iterable[Finding]]] = {
            "torch": lambda: check_torch(torch, tools, has_devices()),
            "GPU memory": lambda: check_gpus(tools, table, None if raylet is None else raylet.pid),
            "shared memory": lambda: check_shared_memory(shared_memory(question.objects)),
            "memory": lambda: check_memory(memory()),
            "file limit": lambda: check_limits(limits()),
            "disk": lambda: check_disks(disks(Path(question.runs), question.writes, ray_folder(question.cluster))),
            "stray processes": lambda: check_processes(table, question.cluster, answers, own_heads()),
            "names": lambda: check_own_name(*own_name()) if question.cluster else (),
            "interfaces": lambda: check_interfaces(os.environ, own_addresses(), self._towards_head()),
            "token file": lambda: check_token_files(token_files()),
        }
        return Examined(
            findings=tuple(finding for name, check in checks.items() for finding in guarded(name, check)),
            versions=own_versions(tools.driver if tools is not None else "", models_of(gpus)),
            variables=own_variables(),
            interface=self.interface,
            ports=tuple(open_ports(table)),
            gpus=gpus,
            torch=torch,
            memory=memory().total,
            offline=is_offline(),
            port=self.listener.port if self.listener else 0,
            is_busy=raylet is not None and any(is_worker_of(raylet, one, table) for one in table.values()),
        )

    def digests(self, named: Sequence[Named]) -> list[str]:
        return [digest_of(one) for one in named]

    def try_reward(self, environment: Environment, rows: Sequence[Row], max_tokens: int) -> Trial:
        return try_reward(environment, rows, max_tokens)

    # --- with others

    def connect(self, targets: Sequence[Target]) -> list[str]:
        return try_targets(targets)

    def leave(self, path: str, token: str, number: int) -> str:
        return shared.leave(path, token, number)

    def unseen(self, path: str, token: str, numbers: Sequence[int], within_s: float) -> list[int]:
        return shared.unseen(path, token, numbers, within_s)

    def remove(self, path: str, token: str, number: int) -> None:
        shared.remove(path, token, number)

    def open_meeting(self, limit_s: float) -> int | str:
        """Its port, or what went wrong."""
        try:
            port: int = self._probe(0).ask("meet", limit_s, address=self.question.address, limit_s=limit_s)
            return port
        except ProbeFailed as failure:
            return str(failure)

    def all_reduce(
        self, address: str, port: int, rank: int, size: int, backend: str, limit_s: float, number: int = 0
    ) -> list[float] | str:
        """Latency and bandwidth, or what went wrong. `number`: of the node's probe and GPU."""
        device = "cpu" if backend == "gloo" else f"cuda:{number}"
        arguments = {"address": address, "port": port, "rank": rank, "size": size, "backend": backend, "device": device}
        try:
            measured: list[float] = self._probe(number).ask("all_reduce", limit_s, limit_s=limit_s, **arguments)
            return measured
        except ProbeFailed as failure:
            return str(failure)

    def all_reduce_inside(self, size: int, backend: str, limit_s: float) -> list[float] | str:
        """Between the GPUs of this node, each in a process of its own."""
        port = self.open_meeting(limit_s)
        if isinstance(port, str):
            return port
        address = self.question.address
        for number in range(size):
            self._probe(number).start()  # not by a thread: a probe ends with the thread that started it
        with ThreadPoolExecutor(size) as pool:
            ranks = [
                pool.submit(self.all_reduce, address, port, rank, size, backend, limit_s, rank) for rank in range(size)
            ]
            results = [rank.result() for rank in ranks]
        return next((result for result in results if isinstance(result, str)), results[0])

    def close(self) -> None:
        for probe in self.probes.values():
            probe.end()
        if self.listener is not None:
            self.listener.close()

    # --- the probe

    def _torch(self) -> TorchFacts:
        try:
            return TorchFacts(**self._probe(0).ask("torch", self.question.limit_s))
        except ProbeFailed as failure:
            return TorchFacts(error=f"`import torch` and a look at its devices: {failure}")

    def _probe(self, number: int) -> Probe:
        if number not in self.probes:
            self.probes[number] = Probe(self._environment())
        return self.probes[number]

    def _environment(self) -> dict[str, str]:
        """As a worker of a run would have it. Ray hides the GPUs from an actor that asked for none, so what the node's
        own process sees is taken."""
        environment = dict(os.environ)
        for name, value in self.question.environment.items():
            environment.setdefault(name, value)
        if self.interface:
            for name in INTERFACE_VARIABLES:
                environment.setdefault(name, self.interface)
        if raylet := os.environ.get("RAY_RAYLET_PID"):
            seen = variables_of(raylet)
            for name in VISIBLE:
                environment.pop(name, None)
                if name in seen:
                    environment[name] = seen[name]
        return environment

    def _interface(self) -> str:
        given = os.environ.get(INTERFACE_VARIABLES[0]) or self.question.environment.get(INTERFACE_VARIABLES[0])
        return given or self._towards_head() or ""

    def _towards_head(self) -> str | None:
        head = self.question.cluster
        return None if head is None else interface_towards(split(head)[0])


def guarded(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """A machine that is unlike all others is no reason to say nothing of it."""
    try:
        return list(check())
    except Exception as error:
        return [Finding("warning", name, f"could not be checked: {error_line(error)}")]


def own_heads() -> list[str]:
    return [member.address for member in own_memberships()]


def ray_folder(cluster: str | None) -> Path | None:
    """Of the cluster's files on this node, if `corral up` started it."""
    member = None if cluster is None else find_membership(cluster)
    return None if member is None else Path(member.temp_dir)


def is_worker_of(raylet: Process, process: Process, table: Table) -> bool:
    """Also while it is called, when the name of the method is behind its own."""
    return process.name.partition(".")[0] == f"ray::{WORKER}" and raylet_of(process, table) == raylet


def variables_of(pid: str) -> dict[str, str]:
    try:
        entries = Path("/proc", pid, "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
