"""The nodes of a Ray cluster: waiting for them and their devices, how they are numbered, and how a loss is noticed.

Ray itself needs a minute to notice that a node was cut off, unless its cluster was started with other settings. So an
agent on every node is asked once a second whether it is there, and how the workers beside it are.
"""

import asyncio
import contextlib
import ipaddress
import os
import select
import socket
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from corral import child_process
from corral.recipe.errors import RunError, UserError
from corral.recipe.placement import Placement
from corral.recipe.rules import SET_BY_RAY
from corral.recipe.schema import Cluster, Service
from corral.runtime.network import CONNECT_S, answers, interface_towards
from corral.runtime.remote_debugger import DebuggerKind, installed_debugger
from corral.runtime.services import Services
from corral.runtime.worker_heartbeat import HEARTBEAT_S, HeartbeatReader, WorkerState

RANK_LABEL = "corral.rank"
"""`ray start --labels corral.rank=3`: the node's place in the numbering of devices."""
WORKER_SLOT = "corral_device"
"""The resource of a node without GPUs, one per worker."""
HEAD_RESOURCE = "node:__internal_head__"
LOG_TAIL_LINES = 10
EXIT_WAIT_S = 3.0
"""Seconds to wait for the exit status of a process that Ray found dead."""
REPORT_EVERY_S = 5.0
LAST_LINE_S = 45.0
"""Seconds without Ray's head after which the end of the run is printed: Ray ends this process after 60, without a word
of Corral's."""
POLL_S = 0.25
FIRST_REPORT_S = 1.0
"""Seconds before a wait is reported: mostly it does not take that long."""

ShowMessage = Callable[[str], None]


@dataclass
class Node:
    """A node of the cluster."""

    rank: int
    """Number in the recipe: it has devices rank x devices_per_node and on."""
    id: str
    address: str
    hostname: str
    devices: tuple[int, ...] = ()
    """Devices of the recipe on this node that are used."""
    agent: Any = None
    relay: Any = None
    """Actor that passes calls on to the node's workers, where the run is large."""
    facts: "NodeFacts" = field(init=False)
    lost: "Future[str]" = field(default_factory=Future)
    """Done when the node is lost, with how that was noticed."""
    gone: "asyncio.Future[str]" = field(init=False)
    """The same, for the event loop."""

    def __str__(self) -> str:
        return f"{self.hostname} ({self.address})"


@dataclass(frozen=True)
class NodeFacts:
    """What only the node itself knows."""

    python: str
    shim: str
    """Path of `child_process.py` on that node."""
    num_cores: int
    interface: str | None
    folder: Path
    """Folder for exit statuses, and for logs where the run's folder is not visible."""
    sees_logs: bool
    debugger: DebuggerKind | None


class NodeAgent:
    """An actor on every node, beside the workers. It imports no torch, so it is there soon and stays small."""

    def __init__(
        self, head: str, marker: Path, token: str, services: Mapping[str, Service], run_folder: Path | None
    ) -> None:
        """`token`: the run's; an agent that Ray started again finds what was there before. `run_folder`: in which the
        controller was started, if that is to be found everywhere."""
        # With the node in its name: several nodes may have one /tmp, and process ids are those of the node.
        node = ray.get_runtime_context().get_node_id()[:12]
        self.folder = Path(tempfile.gettempdir()) / f"corral-{token}-{node}"
        child_process.hold_folder(self.folder)
        child_process.remove_when_released(self.folder)
        self.head, self.marker = head, marker
        logs = marker.parent / "services" / socket.gethostname() if marker.parent.is_dir() else self.folder
        known = run_folder is not None and run_folder.is_dir()
        accelerators = [str(number) for number in ray.get_gpu_ids()]
        self.services = Services(services, logs, run_folder if known else None, accelerators, self.folder)
        self.workers = HeartbeatReader(self.folder)

    def facts(self) -> NodeFacts:
        return NodeFacts(
            python=sys.executable,
            shim=child_process.__file__,
            num_cores=len(os.sched_getaffinity(0)),
            interface=interface_towards(self.head),
            folder=self.folder,
            sees_logs=self.marker.exists(),
            debugger=installed_debugger(),
        )

    def ping(self) -> list[WorkerState]:
        """Answers, which shows that the node is there, with what is known of its workers."""
        return self.workers.look()

    def kill(self, pid: int) -> None:
        """Ends a worker that hangs."""
        self.workers.kill(pid)

    def wait_for_services(self) -> list[str]:
        """Returns what is wrong with the services, once they are ready or cannot be."""
        return self.services.wait()

    def exit_report(self, name: str, pid: int | None = None, log: Path | None = None) -> tuple[int | None, list[str]]:
        """Returns the exit code of a worker that has ended, and the end of its log. One that Ray cannot reach, though
        it has not ended, is ended here: another takes its place."""
        deadline = time.monotonic() + EXIT_WAIT_S
        while (code := child_process.read_exit(self.folder, name)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if code is None and pid is not None:
            self.workers.kill(pid)
        return code, [] if log is None else child_process.last_lines(log, LOG_TAIL_LINES)

    def close(self) -> None:
        """Ends what is left of the workers and the services, and removes the node's folder; logs that are nowhere else
        stay. (Where nobody calls this, the folder goes when the last process has ended.)"""
        for worker in self.workers.look():
            self.workers.kill(worker.pid)
        self.services.close()
        child_process.remove_folder(self.folder)


class Heartbeats:
    """Asks every node once a second, in threads of its own: the controller may compute meanwhile.

    A node is lost when it did not answer for `timeout_s`, or when Ray says so. Only heartbeats that this process
    itself made are counted, so time in which it did not run (a suspended laptop, a debugger) is nobody's silence.
    `on_answer` is called, in a thread, with what a node has answered of its workers; `on_head_lost`, in another, once
    the process on the head node that knows what Ray knows (`gcs_address`) did not answer for as long.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        timeout_s: float,
        gcs_address: str,
        on_answer: Callable[[Node, list[WorkerState]], None],
        on_head_lost: Callable[[], None],
        report: ShowMessage,
    ) -> None:
        self.nodes, self.timeout_s, self.gcs_address = nodes, timeout_s, gcs_address
        self.on_answer, self.on_head_lost, self.report = on_answer, on_head_lost, report
        self.closed = threading.Event()
        work = (self._ask_nodes, self._ask_ray, self._watch_raylet)
        self.threads = [threading.Thread(target=one, daemon=True) for one in work]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        self.closed.set()
        for thread in self.threads:
            thread.join(HEARTBEAT_S + CONNECT_S)

    def _ask_nodes(self) -> None:
        silent_s: dict[str, float] = {}
        pings: dict[str, Any] = {}
        while not self.closed.wait(HEARTBEAT_S):
            for node in list(self.nodes):  # a spare one may be added at any time
                if node.lost.done():
                    continue
                if node.id not in pings:
                    pings[node.id], silent_s[node.id] = node.agent.ping.remote(), 0.0
                silent_s[node.id] += HEARTBEAT_S
                if ray.wait([pings[node.id]], timeout=0)[0]:
                    with contextlib.suppress(ray.exceptions.RayError):  # its agent was ended, and is started again
                        self.on_answer(node, ray.get(pings[node.id]))
                        silent_s[node.id] = 0.0
                    pings[node.id] = node.agent.ping.remote()
                if silent_s[node.id] > self.timeout_s:
                    mark_lost(node, f"it has not answered for {self.timeout_s:g} s (`cluster.node_timeout_s`)")

    def _ask_ray(self) -> None:
        """Apart from the other thread, because it waits for the head node, which may be the one that is gone."""
        silent_s, is_lost, is_reported = 0.0, False, False
        while not self.closed.wait(HEARTBEAT_S):
            if not answers(self.gcs_address):
                silent_s += HEARTBEAT_S
                if silent_s > self.timeout_s and not is_lost:
                    is_lost = True
                    self.on_head_lost()
                if silent_s > LAST_LINE_S and not is_reported:  # what waits for the head cannot end by itself
                    is_reported = True
                    head = f"Ray's head process (GCS, {self.gcs_address})"
                    self.report(
                        f"error: {head} has not answered for {LAST_LINE_S:g} s, and after 60 s Ray ends the run"
                    )
                continue
            silent_s = 0.0
            alive = {entry["NodeID"] for entry in ray.nodes() if entry["Alive"]}
            for node in list(self.nodes):
                if node.id not in alive:
                    mark_lost(node, "Ray found it dead")

    def _watch_raylet(self) -> None:
        """Reports at once that Ray's process on the controller's node has ended. Without it Ray ends this process too,
        in whatever call of Ray's comes next and without a line, so that nothing later could say why; unless the loss
        of a worker is noticed first, for which the run starts Ray anew."""
        raylet = find_raylet(self.gcs_address)
        if raylet is None:
            return
        try:
            descriptor = os.pidfd_open(raylet)
        except OSError:  # a kernel without it; or the raylet has ended, which the other threads notice
            return
        with open(descriptor, "rb", buffering=0) as process:
            poll = select.poll()
            poll.register(process, select.POLLIN)
            while not self.closed.is_set():
                if poll.poll(1000 * HEARTBEAT_S) and not self.closed.is_set():
                    self.report(f"error: Ray's process on this node (raylet, {raylet}) has ended, and with it this Ray")
                    return


def find_raylet(gcs_address: str) -> int | None:
    """Process id of the raylet on this node that belongs to the cluster with this address; None where /proc does not
    show it."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if words[0].endswith(b"/raylet") and f"--gcs-address={gcs_address}".encode() in words:
                return int(process.name)
    return None


def mark_lost(node: Node, how: str) -> None:
    with contextlib.suppress(Exception):  # the other thread was first
        node.lost.set_result(how)


# --- finding nodes and reserving devices


async def find_nodes(cluster: Cluster, without: frozenset[str], report: ShowMessage) -> tuple[str, list[Node]]:
    """Returns the resource that stands for a device, and the nodes, once all that were not lost are there."""
    min_nodes = cluster.min_nodes or cluster.nodes
    wait = ReportedWait(cluster.start_timeout_s, report)
    while True:
        entries = ray.nodes()
        alive = [entry for entry in entries if entry["Alive"]]
        resource = "GPU" if any(entry["Resources"].get("GPU") for entry in alive) else WORKER_SLOT
        large = [entry for entry in entries if entry["Resources"].get(resource, 0) >= cluster.devices_per_node]
        dead = [entry for entry in entries if not entry["Alive"]]
        nodes = number_nodes([*dead, *large], cluster.nodes, without)
        if len(nodes) >= cluster.nodes - len(without) and len(nodes) >= min_nodes:
            return resource, nodes
        lack = f"{devices_table(resource)}; needed: {cluster.nodes} nodes with {cluster.devices_per_node} devices each"
        if without:
            lack += f", at least {min_nodes} (`cluster.min_nodes`), and lost: {', '.join(sorted(without))}"
        if wait.is_over:
            if len(nodes) >= min_nodes:
                return resource, nodes
            raise (RunError if without else UserError)(f"the Ray cluster is too small: {lack}")
        await wait.poll(f"waiting for nodes: {lack}")


def number_nodes(entries: Iterable[dict[str, Any]], num_nodes: int, without: frozenset[str]) -> list[Node]:
    """Returns the nodes for the recipe, in its numbering: by label, else head first, then by address.

    A node that was lost keeps its number, so that the others keep theirs; a spare node gets it, if there is one.
    `entries`: as `ray.nodes()` has them, those that are dead before those with the devices that are needed.
    """
    known: dict[str, dict[str, Any]] = {address: {"NodeManagerAddress": address} for address in without}
    for entry in entries:
        if entry["NodeManagerAddress"] in without or entry["Alive"]:
            known[entry["NodeManagerAddress"]] = entry
    ordered = sorted(known.values(), key=node_order)
    spare = [entry for entry in ordered[num_nodes:] if entry["NodeManagerAddress"] not in without]
    nodes = []
    for rank, entry in enumerate(ordered[:num_nodes]):
        if entry["NodeManagerAddress"] in without:
            if not spare:
                continue
            entry = spare.pop(0)
        nodes.append(Node(rank, entry["NodeID"], entry["NodeManagerAddress"], entry["NodeManagerHostname"]))
    return nodes


def node_order(entry: dict[str, Any]) -> tuple[float, bool, int]:
    label = entry.get("Labels", {}).get(RANK_LABEL, "")
    is_head = HEAD_RESOURCE in entry.get("Resources", {})
    rank = float(label) if label.isdecimal() else float("inf")
    return rank, not is_head, int(ipaddress.ip_address(entry["NodeManagerAddress"]))


def restrict_placement(
    placement: Placement, nodes: Iterable[Node], per_node: int, without: frozenset[str]
) -> Placement:
    """Returns the roles on the devices that are there, and sets for each node which of its devices are used."""
    present = {node.rank: node for node in nodes}
    roles = {
        role: tuple(device for device in devices if device // per_node in present)
        for role, devices in placement.roles.items()
    }
    for role, devices in roles.items():
        if not devices:
            raise RunError(f"{role} has no device left: it was on {', '.join(sorted(without)) or 'missing nodes'} only")
    for node in present.values():
        numbers = range(node.rank * per_node, (node.rank + 1) * per_node)
        node.devices = tuple(number for number in numbers if any(number in devices for devices in roles.values()))
    return replace(placement, roles=roles)


async def reserve_devices(
    cluster: Cluster, resource: str, nodes: Sequence[Node], report: ShowMessage
) -> tuple[Any, dict[int, int], dict[str, int]]:
    """Reserves one bundle of a placement group for each device that is used, on the node that it is numbered for, and
    one for each node with all devices that services claim there. Returns the group, the bundle of each device, and that
    of the services by the id of the node, where they claim any."""
    num_claimed = cluster.num_service_devices
    bundles = [{resource: 1, f"node:{node.address}": 0.001} for node in nodes for _ in node.devices]
    devices = [device for node in nodes for device in node.devices]
    of_services = {node.id: len(bundles) + i for i, node in enumerate(nodes) if num_claimed}
    bundles += [{resource: num_claimed, f"node:{node.address}": 0.001} for node in nodes if num_claimed]
    group = placement_group(bundles, strategy="PACK")
    wait = ReportedWait(cluster.start_timeout_s, report)
    try:
        while not await asyncio.to_thread(group.wait, POLL_S):
            needed = ", ".join(f"{node} {len(node.devices) + num_claimed}" for node in nodes)
            lack = f"{devices_table(resource)}; needed: {needed}"
            if wait.is_over:
                raise UserError(
                    f"devices of the Ray cluster were not free within {cluster.start_timeout_s:g} s "
                    f"(`cluster.start_timeout_s`): {lack}; `ray status` shows who has them"
                )
            await wait.poll(f"waiting for devices: {lack}")
    except BaseException:
        remove_placement_group(group)
        raise
    return group, {device: bundle for bundle, device in enumerate(devices)}, of_services


class ReportedWait:
    """A wait with a deadline that reports now and then what it is for."""

    def __init__(self, timeout_s: float, report: ShowMessage) -> None:
        self.deadline, self.report = time.monotonic() + timeout_s, report
        self.next_report = time.monotonic() + FIRST_REPORT_S

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline

    async def poll(self, message: str) -> None:
        if time.monotonic() >= self.next_report:
            self.report(message)
            self.next_report = time.monotonic() + REPORT_EVERY_S
        await asyncio.sleep(POLL_S)


def devices_table(resource: str) -> str:
    """Describes every node with its devices, and how many of them are free."""
    free = ray._private.state.available_resources_per_node()
    rows = [
        f"{entry['NodeManagerHostname']} ({entry['NodeManagerAddress']}) has {entry['Resources'].get(resource, 0):g} "
        f"devices, {free.get(entry['NodeID'], {}).get(resource, 0):g} free"
        for entry in ray.nodes()
        if entry["Alive"]
    ]
    return "; ".join(rows)


# --- actors

NOT_SET_BY_RAY = "RAY_EXPERIMENTAL_NOSET_"
"""Beginning of a variable that makes Ray leave another one as it is."""
SHARED_GPUS = "CORRAL_SHARED_GPUS"
"""Environment variable of a run whose nodes are all on this machine: the number of its GPUs, which workers share. Ray
has as many GPUs as the recipe then."""


def gpu_variables_of_ray(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns variables with which Ray shows an actor its own GPUs and no others, also where the nodes' environment
    tells it not to; or, where workers share a GPU, all of them, among which the actor chooses (`shared_gpu`)."""
    if SHARED_GPUS in environment:
        return {SHARED_GPUS: environment[SHARED_GPUS], f"{NOT_SET_BY_RAY}CUDA_VISIBLE_DEVICES": "1"}
    return {f"{NOT_SET_BY_RAY}{name}": "" for name in SET_BY_RAY}


def remote_class(kind: type, where: Any, *, py_executable: str | None = None, **options: Any) -> Any:
    """Makes a class whose objects are actors, with the controller's import path: functions that a recipe names live
    there, perhaps Corral too. Ray's head would keep 3 kB of each of the last 100,000 calls of an actor, for its
    dashboard: of heartbeats alone that is all of it within a day."""
    variables = {
        "PYTHONPATH": os.pathsep.join(own_import_path()),
        # Torch warns of host names that cannot be resolved, and such.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    environment: dict[str, Any] = {"env_vars": variables | gpu_variables_of_ray(os.environ)}
    if py_executable is not None:
        environment["py_executable"] = py_executable
    always = {"num_cpus": 0, "enable_task_events": False}
    return ray.remote(kind).options(scheduling_strategy=where, runtime_env=environment, **always, **options)


def own_import_path() -> list[str]:
    """Returns this process's import path, without what may lie elsewhere on another node: what belongs to the Python
    installation, and what Ray itself puts on each node."""
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    entries = dict.fromkeys(os.path.abspath(entry) for entry in sys.path)
    own = [entry for entry in entries if os.path.isdir(entry) and not entry.startswith(installed)]
    return [entry for entry in own if not copied_by_ray(Path(entry))]


def copied_by_ray(path: Path) -> bool:
    """Whether the path is in a job's copy of the folder that was submitted, or another thing that a `runtime_env`
    names. Ray makes one on each node, and lets every process of the job find its own."""
    folder = Path(ray._private.worker._global_node.get_runtime_env_dir_path())
    return path.resolve().is_relative_to(folder.resolve())
