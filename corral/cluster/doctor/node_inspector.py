"""What the doctor finds out on one node. On this node the inspector is an object; on the others an actor, beside
whatever runs there.

It imports no torch: what needs torch is done by a probe process, which can be killed.
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from corral.cluster.doctor import file_checks, machine_checks, network_checks, recipe_checks
from corral.cluster.doctor.findings import Finding, NodeRef
from corral.cluster.doctor.machine_checks import TorchFacts, check_gpus, check_torch, describe_models
from corral.cluster.doctor.network_checks import OpenPort, check_processes, check_token_files, open_ports, token_files
from corral.cluster.doctor.torch_probe import ProbeFailed, TorchProbe
from corral.cluster.identity import own_addresses, resolve
from corral.cluster.node_processes import all_processes, raylet_of
from corral.cluster.node_report import Gpu, device_vendor, query_gpus
from corral.data.plugins import error_line
from corral.host_memory import node_memory
from corral.recipe.errors import first_line
from corral.runtime.membership import find_membership, own_memberships
from corral.runtime.network import (
    INTERFACE_VARIABLES,
    answers,
    interface_towards,
    split_address,
    variables_of_interface,
)

WORKER = "ray::DeviceProcess"
"""Ray calls a worker by the name of its class, `runtime.ray_group.DeviceProcess`."""
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
ACTOR_THREADS = 8
CLOSE_S = 5.0
Result = TypeVar("Result")
NodeArguments = Callable[[NodeRef], Sequence[Any]]


@dataclass(frozen=True)
class InspectionRequest:
    """What a node is to look at."""

    cluster: str | None  # host:port of its head; None: there is none
    address: str  # of the node itself, as the others reach it
    folder: str  # in which the doctor was called; a run would be started there
    runs: str  # folder of the runs
    writes: int  # bytes that a run will write there
    objects: int | None  # bytes that Ray's object store may take, where it runs
    environment: Mapping[str, str]  # interface variables of the calling process, which a run would pass on
    limit_s: float  # for torch to be imported and to find its devices


@dataclass(frozen=True)
class NodeState:
    """What the node found, and what has to be compared with others."""

    findings: tuple[Finding, ...]
    versions: Mapping[str, str]
    variables: Mapping[str, str]
    interface: str  # that gloo and NCCL would use
    ports: tuple[OpenPort, ...]
    gpus: tuple[Gpu, ...]
    torch: TorchFacts
    memory: int
    offline: bool  # no downloads from the hub
    port: int  # on which it listens for the others
    is_busy: bool  # a run of this cluster is on the node


class NodeInspector:
    """Each public method is one request to a node. Failures that concern other nodes come back as text."""

    def __init__(self, request: InspectionRequest) -> None:
        self.request = request
        if os.path.isdir(request.folder):
            os.chdir(request.folder)
            if request.folder not in sys.path:
                sys.path.append(request.folder)
        self.towards_head = None if request.cluster is None else interface_towards(split_address(request.cluster)[0])
        given = os.environ.get(INTERFACE_VARIABLES[0]) or request.environment.get(INTERFACE_VARIABLES[0])
        self.interface = given or self.towards_head or ""
        self.probes: dict[int, TorchProbe] = {}
        self._probe(0).start()
        self.listener = None
        if request.cluster:
            self.listener = network_checks.Listener(request.address, f"corral {request.address}")

    def clock(self) -> float:
        return time.time()

    # --- alone

    def examine(self) -> NodeState:
        request, table, inventory, machine = self.request, all_processes(), query_gpus(), machine_checks
        host = socket.gethostname()
        try:
            torch = TorchFacts(**self._probe(0).call("torch", request.limit_s))
        except ProbeFailed as failure:
            torch = TorchFacts(error=f"`import torch` and a look at its devices: {failure}")
        gpus = inventory.gpus if inventory is not None else ()
        raylet = next((one for one in table.values() if one.name == "raylet" and one.head == request.cluster), None)
        member = None if request.cluster is None else find_membership(request.cluster)
        ray_folder = None if member is None else Path(member.temp_dir)
        own_heads = [member.address for member in own_memberships()]
        # While a worker is called, the name of the method follows its own.
        workers = [one for one in table.values() if one.name.partition(".")[0] == WORKER]
        checks: dict[str, Callable[[], Iterable[Finding]]] = {
            "torch": lambda: check_torch(torch, inventory, device_vendor()),
            "GPU memory": lambda: check_gpus(inventory, table, None if raylet is None else raylet.pid),
            "shared memory": lambda: machine.check_shared_memory(machine.shared_memory(request.objects)),
            "memory": lambda: machine.check_memory(node_memory()),
            "file limit": lambda: machine.check_limits(machine.limits()),
            "disk": lambda: machine.check_disks(machine.disks(Path(request.runs), request.writes, ray_folder)),
            "stray processes": lambda: check_processes(table, request.cluster, answers, own_heads),
            "names": lambda: network_checks.check_own_name(host, resolve(host)) if request.cluster else (),
            "interfaces": lambda: network_checks.check_interfaces(os.environ, own_addresses(), self.towards_head),
            "token file": lambda: check_token_files(token_files()),
        }
        return NodeState(
            findings=tuple(finding for name, check in checks.items() for finding in guarded(name, check)),
            versions=file_checks.own_versions(inventory.driver if inventory is not None else "", describe_models(gpus)),
            variables={name: value for name, value in os.environ.items() if name.startswith(network_checks.COMPARED)},
            interface=self.interface,
            ports=tuple(open_ports(table)),
            gpus=gpus,
            torch=torch,
            memory=node_memory().total,
            offline=os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"),
            port=self.listener.port if self.listener else 0,
            is_busy=raylet is not None and any(raylet_of(one, table) == raylet for one in workers),
        )

    def digests(self, required: Sequence[file_checks.RequiredFile]) -> list[str]:
        return [file_checks.digest_of(one) for one in required]

    try_reward = staticmethod(recipe_checks.try_reward)

    # --- with other nodes

    try_connections = staticmethod(network_checks.try_connections)
    write_marker = staticmethod(file_checks.write_marker)
    unseen_markers = staticmethod(file_checks.unseen_markers)
    remove_marker = staticmethod(file_checks.remove_marker)

    def open_store(self, limit_s: float) -> int | str:
        """Opens a store through which processes find each other. Returns its port, or what went wrong."""
        try:
            port: int = self._probe(0).call("open_store", limit_s, address=self.request.address, limit_s=limit_s)
            return port
        except ProbeFailed as failure:
            return str(failure)

    def measure_group(
        self, address: str, port: int, first: int, number: int, size: int, backend: str, limit_s: float
    ) -> dict[str, Any] | str:
        """Fields of `GroupSpeed`, or what went wrong. `first`, `number`: the ranks of this node, each of which has a
        process and a GPU of its own. `address`, `port`: of the group's store."""
        for own in range(number):
            self._probe(own).start()  # not by a thread: a probe ends with the thread that started it

        def measure(own: int) -> dict[str, Any] | str:
            device = "cpu" if backend == "gloo" else f"cuda:{own}"
            try:
                measured: dict[str, Any] = self._probe(own).call(
                    "measure_group",
                    limit_s,
                    **{"address": address, "port": port, "rank": first + own, "size": size, "backend": backend},
                    **{"device": device, "limit_s": limit_s},
                )
                return measured
            except ProbeFailed as failure:
                return str(failure)

        with ThreadPoolExecutor(number) as pool:
            results = list(pool.map(measure, range(number)))
        return next((result for result in results if isinstance(result, str)), results[0])

    def close(self) -> None:
        for probe in self.probes.values():
            probe.end()
        if self.listener is not None:
            self.listener.close()

    # --- the probe

    def _probe(self, number: int) -> TorchProbe:
        if number not in self.probes:
            self.probes[number] = TorchProbe(self._environment())
        return self.probes[number]

    def _environment(self) -> dict[str, str]:
        """Environment as a worker of a run would have it. Ray hides the GPUs from an actor that requested none, so what
        the node's raylet sees is taken."""
        interfaces = variables_of_interface(self.interface) if self.interface else {}
        environment = {**interfaces, **self.request.environment, **os.environ}
        if raylet := os.environ.get("RAY_RAYLET_PID"):
            entries: list[str] = []
            with contextlib.suppress(OSError):
                entries = Path("/proc", raylet, "environ").read_bytes().decode(errors="replace").split("\0")
            environment = {name: value for name, value in environment.items() if name not in VISIBLE}
            seen = [entry.partition("=") for entry in entries]
            environment |= {name: value for name, _, value in seen if name in VISIBLE}
        return environment


def guarded(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """A machine that is unlike all others must not stop the other checks."""
    try:
        return list(check())
    except Exception as error:
        return [Finding("warning", name, f"could not be checked: {error_line(error)}")]


# --- the nodes that are checked


def same_for_all(*arguments: Any) -> NodeArguments:
    return lambda node: arguments


class NodeSet:
    """The nodes that answer, in the order of their ranks: here this one alone, with an inspector in this process.

    `limit_s`: for a call, unless it has its own."""

    def __init__(self, inspectors: dict[NodeRef, Any], limit_s: float) -> None:
        self.inspectors, self.limit_s = inspectors, limit_s
        self.findings: list[Finding] = []  # about nodes that did not answer

    @property
    def refs(self) -> list[NodeRef]:
        return list(self.inspectors)

    def call(
        self,
        method: Callable[..., Result],
        arguments: NodeArguments = same_for_all(),
        *,
        only: Sequence[NodeRef] | None = None,
        limit_s: float | None = None,
    ) -> dict[NodeRef, Result]:
        """Calls a method of `NodeInspector` on all nodes at once, or only on some, each with its own arguments. Returns
        the results of those that answered."""
        own = {ref: arguments(ref) for ref in self.inspectors if only is None or ref in only}
        return self._call(method.__name__, own, self.limit_s if limit_s is None else limit_s)

    def _call(self, method: str, arguments: Mapping[NodeRef, Sequence[Any]], limit_s: float) -> dict[NodeRef, Any]:
        return {ref: getattr(self.inspectors[ref], method)(*own) for ref, own in arguments.items()}

    def close(self) -> None:
        for inspector in self.inspectors.values():
            inspector.close()


class ClusterNodes(NodeSet):
    """All nodes of the cluster that this process has joined, each with an actor that inspects it. A node that does not
    answer is a finding, and is not called again. `entries`: as `ray.nodes()` has them."""

    def __init__(
        self,
        entries: Mapping[NodeRef, Mapping[str, Any]],
        request_for: Callable[[NodeRef], InspectionRequest],
        limit_s: float,
    ) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from corral.runtime.nodes import remote_class

        super().__init__({}, limit_s)
        self.ports = {ref: int(entry["NodeManagerPort"]) for ref, entry in entries.items()}  # of the raylets
        for ref, entry in entries.items():
            where = NodeAffinitySchedulingStrategy(entry["NodeID"], soft=False)
            kind = remote_class(NodeInspector, where, max_concurrency=ACTOR_THREADS)
            self.inspectors[ref] = kind.remote(request_for(ref))

    def _call(self, method: str, arguments: Mapping[NodeRef, Sequence[Any]], limit_s: float) -> dict[NodeRef, Any]:
        import ray
        from ray.exceptions import RayError

        calls, results = {}, {}
        for ref, own in arguments.items():
            try:
                calls[getattr(self.inspectors[ref], method).remote(*own)] = ref
            except Exception as error:  # what Ray raises here for an actor that it knows to be dead has no class
                self._drop(ref, first_line(error))
        if not calls:
            return {}
        done, late = ray.wait(list(calls), num_returns=len(calls), timeout=limit_s)
        for reference in done:
            ref = calls[reference]
            try:
                results[ref] = ray.get(reference)
            except RayError as error:  # its own text and a traceback come before the line that was raised there
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                self._drop(ref, lines[-1] if lines else first_line(error))
        for reference in late:
            self._drop(calls[reference], f"it has not answered for {limit_s:g} s")
        return {ref: results[ref] for ref in self.inspectors if ref in results}

    def _drop(self, ref: NodeRef, why: str) -> None:
        """Leaves a node out, with what can be found from here: whether it takes connections from this node."""
        del self.inspectors[ref]
        refusal = network_checks.try_connection(network_checks.ConnectionTarget(ref.address, self.ports[ref]))
        what, fix = f"could not be checked: {why}", "see that the same Corral is installed there"
        if refusal:
            what += f"; and this node cannot connect to {ref.address}:{self.ports[ref]} ({refusal})"
            fix = f"open the ports of {ref.host} to this node, or see whether it still runs"
        self.findings.append(Finding("error", "nodes", what, fix, (ref,)))

    def close(self) -> None:
        import ray

        closing = [actor.close.remote() for actor in self.inspectors.values()]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        for actor in self.inspectors.values():
            ray.kill(actor)
