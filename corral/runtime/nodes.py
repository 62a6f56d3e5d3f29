"""The nodes of a Ray cluster: how they are numbered, what each is asked, and how the loss of one is noticed.

Ray itself needs a minute to notice that a node was cut off, unless its cluster was started with other settings. So an
agent on every node is asked once a second whether it is there.
"""

import asyncio
import contextlib
import ipaddress
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from corral import child_process
from corral.recipe.errors import RunError
from corral.recipe.placement import Placement
from corral.recipe.schema import Service
from corral.runtime.network import CONNECT_S, answers, interface_towards
from corral.runtime.remote_debugger import Kind, kind_here
from corral.runtime.services import Services

RANK_LABEL = "corral.rank"
"""`ray start --labels corral.rank=3`: the node's place in the numbering of devices."""
WORKER_SLOT = "corral_device"
"""The resource of a node without GPUs, one per worker."""
HEAD_RESOURCE = "node:__internal_head__"
TICK_S = 1.0
LAST_LINES = 10
EXIT_WAIT_S = 3.0
"""For the exit status of a process that Ray found dead."""


@dataclass
class Node:
    rank: int
    """In the recipe's numbering: it has devices rank x devices_per_node and on."""
    id: str
    address: str
    hostname: str
    devices: tuple[int, ...] = ()
    """Of the recipe, those that are used."""
    agent: Any = None
    facts: "NodeFacts" = field(init=False)
    lost: "Future[str]" = field(default_factory=Future)
    """Done when the node is lost, with how that was noticed."""
    gone: "asyncio.Future[str]" = field(init=False)
    """The same, for the event loop."""

    def __str__(self) -> str:
        return f"{self.hostname} ({self.address})"


@dataclass(frozen=True)
class NodeFacts:
    """What the node itself knows."""

    python: str
    shim: str
    """Path of `child_process.py` on that node."""
    num_cores: int
    interface: str | None
    folder: Path
    """For exit statuses, and for logs where the run's folder is not visible."""
    sees_logs: bool
    debugger: Kind | None


class NodeAgent:
    """An actor on every node, beside the workers. It imports no torch, so it is there soon and stays small."""

    def __init__(
        self, head: str, marker: Path, token: str, services: Mapping[str, Service], run_folder: Path | None
    ) -> None:
        """`token`: the run's; an agent that Ray started again finds what was there before. `run_folder`: in which the
        controller was started, if that is to be found everywhere."""
        self.folder = Path(tempfile.gettempdir()) / f"corral-{token}"
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.head, self.marker = head, marker
        logs = marker.parent / "services" / socket.gethostname() if marker.parent.is_dir() else self.folder
        known = run_folder is not None and run_folder.is_dir()
        self.services = Services(services, logs, run_folder if known else None)

    def facts(self) -> NodeFacts:
        cores = len(os.sched_getaffinity(0))
        interface = interface_towards(self.head)
        sees_logs = self.marker.exists()
        return NodeFacts(sys.executable, child_process.__file__, cores, interface, self.folder, sees_logs, kind_here())

    def ping(self) -> None:
        """To answer is enough."""

    def await_services(self) -> list[str]:
        """What is wrong with them."""
        return self.services.wait()

    def last_words(self, pid: int, log: Path) -> tuple[int | None, list[str]]:
        """The exit code of a worker that has ended, and the end of its log."""
        deadline = time.monotonic() + EXIT_WAIT_S
        while (code := child_process.read_exit(self.folder, pid)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return code, child_process.last_lines(log, LAST_LINES)

    def close(self) -> None:
        """Logs that are nowhere else stay."""
        self.services.close()
        if not any(self.folder.glob("*.log")):
            shutil.rmtree(self.folder, ignore_errors=True)


def arrange(entries: Iterable[dict[str, Any]], num_nodes: int, without: frozenset[str]) -> list[Node]:
    """The nodes for the recipe, in its numbering: by label, else head first, then by address.

    A node that was lost keeps its place, so that the others keep theirs; a spare node takes it, if there is one.
    `entries`: as `ray.nodes()` has them, those that are dead before those with the devices that are needed.
    """
    known: dict[str, dict[str, Any]] = {address: {"NodeManagerAddress": address} for address in without}
    for entry in entries:
        if entry["NodeManagerAddress"] in without or entry["Alive"]:
            known[entry["NodeManagerAddress"]] = entry
    ordered = sorted(known.values(), key=place)
    spare = [entry for entry in ordered[num_nodes:] if entry["NodeManagerAddress"] not in without]
    nodes = []
    for rank, entry in enumerate(ordered[:num_nodes]):
        if entry["NodeManagerAddress"] in without:
            if not spare:
                continue
            entry = spare.pop(0)
        nodes.append(Node(rank, entry["NodeID"], entry["NodeManagerAddress"], entry["NodeManagerHostname"]))
    return nodes


def place(entry: dict[str, Any]) -> tuple[float, bool, int]:
    label = entry.get("Labels", {}).get(RANK_LABEL, "")
    is_head = HEAD_RESOURCE in entry.get("Resources", {})
    rank = float(label) if label.isdecimal() else float("inf")
    return rank, not is_head, int(ipaddress.ip_address(entry["NodeManagerAddress"]))


def restrict(placement: Placement, nodes: Iterable[Node], per_node: int, without: frozenset[str]) -> Placement:
    """The roles on the devices that are there. Tells each node which of its devices are used."""
    there = {node.rank: node for node in nodes}
    roles = {
        role: tuple(device for device in devices if device // per_node in there)
        for role, devices in placement.roles.items()
    }
    for role, devices in roles.items():
        if not devices:
            raise RunError(f"{role} has no device left: it was on {', '.join(sorted(without)) or 'missing nodes'} only")
    for node in there.values():
        numbers = range(node.rank * per_node, (node.rank + 1) * per_node)
        node.devices = tuple(number for number in numbers if any(number in devices for devices in roles.values()))
    return Placement(placement.num_devices, roles)


def head_address() -> str:
    entries = [entry for entry in ray.nodes() if entry["Alive"]]
    head = next((entry for entry in entries if HEAD_RESOURCE in entry["Resources"]), entries[0])
    address: str = head["NodeManagerAddress"]
    return address


class Heartbeats:
    """Asks every node once a second, in a thread of its own: the controller may compute meanwhile.

    A node is lost when it did not answer for `timeout_s`, or when Ray says so. Time in which this process itself did
    not run does not count.
    """

    def __init__(self, nodes: Sequence[Node], timeout_s: float, gcs_address: str) -> None:
        """`gcs_address`: of the process on the head node that knows what Ray knows."""
        self.nodes, self.timeout_s, self.gcs_address = nodes, timeout_s, gcs_address
        self.closed = threading.Event()
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._ask_nodes, self._ask_ray)]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        self.closed.set()
        for thread in self.threads:
            thread.join(TICK_S + CONNECT_S)

    def _ask_nodes(self) -> None:
        silent_s = {node.id: 0.0 for node in self.nodes}
        pings = {node.id: node.agent.ping.remote() for node in self.nodes}
        while not self.closed.wait(TICK_S):
            for node in self.nodes:
                if node.lost.done():
                    continue
                silent_s[node.id] += TICK_S
                if ray.wait([pings[node.id]], timeout=0)[0]:
                    with contextlib.suppress(ray.exceptions.RayError):  # its agent was ended, and is started again
                        ray.get(pings[node.id])
                        silent_s[node.id] = 0.0
                    pings[node.id] = node.agent.ping.remote()
                if silent_s[node.id] > self.timeout_s:
                    lose(node, f"it has not answered for {self.timeout_s:g} s (`cluster.node_timeout_s`)")

    def _ask_ray(self) -> None:
        """Apart from the other, because it waits for the head node, which may be the one that is gone."""
        while not self.closed.wait(TICK_S):
            if not answers(self.gcs_address):
                continue
            alive = {entry["NodeID"] for entry in ray.nodes() if entry["Alive"]}
            for node in self.nodes:
                if node.id not in alive:
                    lose(node, "Ray found it dead")


def lose(node: Node, how: str) -> None:
    with contextlib.suppress(Exception):  # the other thread was first
        node.lost.set_result(how)
