"""The head of a cluster: where it is, and what its GCS (Ray's head process) knows of the nodes.

The GCS also holds a small key-value store that all nodes share. It is queried directly, without joining the cluster as
a driver, so a query takes half a second and works from outside.

For clusters in which nobody knows the head's address beforehand, the head writes it to a file on a shared file system.
A file that an earlier cluster left behind sends workers to a machine that is off, or, worse, to somebody else's
cluster. So the file says which cluster wrote it and when, and a worker trusts it only if that very cluster answers.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from corral.cluster.node_report import SAME_EVERYWHERE, NodeReport
from corral.observe.console import duration
from corral.observe.run_files import write_atomically
from corral.observe.status_line import Countdown
from corral.recipe.errors import RunError, UserError
from corral.runtime.network import answers
from corral.runtime.nodes import RANK_LABEL, WORKER_SLOT
from corral.runtime.token import use_token

NAMESPACE = b"corral"
MARK_LABEL = "corral.mark"
QUERY_S = 10
ALIVE = 0  # in Ray's protocol
HOW_TO_START = "start it with `corral up` on each node, or say which one with --address HOST:PORT"
GIB = 2**30
VERSIONS = ("corral", "ray", "torch", "python", "driver")
HEADINGS = ("rank", "host", "address", "devices", "memory", *VERSIONS)


@dataclass(frozen=True)
class NodeEntry:
    """A node as the GCS knows it."""

    id: str
    rank: int | None
    mark: str  # of the `corral up` that started it, or empty
    hostname: str
    address: str
    is_alive: bool
    is_head: bool
    resources: dict[str, float]

    @classmethod
    def of(cls, node_id: str, info: Any) -> Self:
        labels = dict(info.labels)
        rank = labels.get(RANK_LABEL, "")
        return cls(
            id=node_id,
            rank=int(rank) if rank.isdecimal() else None,
            mark=labels.get(MARK_LABEL, ""),
            hostname=info.node_manager_hostname,
            address=info.node_manager_address,
            is_alive=info.state == ALIVE,
            is_head=info.is_head_node,
            resources=dict(info.resources_total),
        )

    @property
    def devices(self) -> int:
        """Number of GPUs; on nodes without, of worker slots."""
        return int(self.resources.get("GPU") or self.resources.get(WORKER_SLOT, 0))

    def __str__(self) -> str:
        rank = "" if self.rank is None else f"{self.rank} "
        return f"{rank}{self.hostname} ({self.address})"


class NoAnswer(UserError):
    """Nothing listens at the address, or it does not answer as Ray's head does."""


class TokenRefused(UserError):
    """The head is there, and refuses the token."""


class Gcs:
    """A connection to the head process at `address`, host:port."""

    def __init__(self, address: str) -> None:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        if not answers(address):
            raise NoAnswer(f"no Ray cluster answers at {address}")
        self.address = address
        with self._errors_translated():
            self.client = GcsClient(address=address)

    @property
    def cluster_id(self) -> str:
        return str(self.client.cluster_id.hex())

    def nodes(self) -> list[NodeEntry]:
        """All nodes that were ever in the cluster: those with a rank first, in its order."""
        with self._errors_translated():
            entries = self.client.get_all_node_info(timeout=QUERY_S)
        found = [NodeEntry.of(node.hex(), info) for node, info in entries.items()]
        return sorted(found, key=lambda node: (node.rank is None, node.rank, not node.is_head, node.address))

    def put(self, key: str, value: Any) -> None:
        """Stores a value, as JSON, where all nodes find it."""
        with self._errors_translated():
            self.client.internal_kv_put(key.encode(), json.dumps(value).encode(), True, NAMESPACE, QUERY_S)

    def get(self, key: str) -> Any:
        found = self.get_of_ray(key.encode(), NAMESPACE)
        return None if found is None else json.loads(found)

    def get_of_ray(self, key: bytes, namespace: bytes | None) -> bytes | None:
        """A value from the store that Ray keeps its own entries in."""
        with self._errors_translated():
            found: bytes | None = self.client.internal_kv_get(key, namespace, QUERY_S)
        return found

    def delete_of_ray(self, key: bytes, namespace: bytes | None) -> None:
        with self._errors_translated():
            self.client.internal_kv_del(key, False, namespace, QUERY_S)

    @contextmanager
    def _errors_translated(self) -> Iterator[None]:
        """Turns Ray's errors into ones that a user can do something about."""
        from ray.exceptions import AuthenticationError, RaySystemError, RpcError

        try:
            yield
        except AuthenticationError as error:
            raise TokenRefused(
                f"the Ray cluster at {self.address} refuses this token; copy the head's ~/.corral/token to this node, "
                "or set RAY_AUTH_TOKEN"
            ) from error
        except (RpcError, RaySystemError, RuntimeError) as error:
            raise NoAnswer(f"what answers at {self.address} is not the head of a Ray cluster that runs") from error


@dataclass(frozen=True)
class HeadFile:
    """Address of the head in a file on a shared file system, with what tells whether it is current."""

    id: str  # of the launcher's job, or made up by the head
    cluster_id: str  # Ray's own, different for every start
    address: str
    time: float
    hostname: str

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            raise NoAnswer(f"{path} is not there yet") from None
        except (ValueError, TypeError) as error:
            raise UserError(f"{path} is not a head file of Corral; remove it") from error

    def check(self, path: Path, id: str | None = None) -> None:
        """Raises if the file must not be trusted. `id`: of the launcher's job, where that is known."""
        age = f"written {duration(abs(time.time() - self.time))} ago by {self.hostname}"
        if id is not None and self.id != id:
            raise NoAnswer(f"{path}: it is of another start ({self.id}, {age}), not of {id}")
        try:
            answering = Gcs(self.address).cluster_id
        except NoAnswer:
            raise NoAnswer(f"{path}: it is stale: {age}, and no cluster answers at {self.address}") from None
        except TokenRefused:
            why = f"it is not of the token that this node has: {age}, and {self.address} refuses it"
            raise NoAnswer(f"{path}: {why}") from None
        if answering != self.cluster_id:
            raise NoAnswer(f"{path}: it is stale: {age}, and another cluster answers at {self.address} now")


def token_beside(head_file: Path) -> Path:
    return head_file.with_name(f"{head_file.name}.token")


# --- the cluster that a command means


def find_head(address: str | None = None) -> str:
    """host:port of the head of the cluster that a command means: the given address, else `RAY_ADDRESS`, else the
    cluster that this node is part of. Its token is used from here on."""
    from corral.runtime.connection import find_cluster

    found = find_cluster(address)
    if found in (None, "local"):  # `local` asks Ray to start one
        raise UserError(f"this node is not part of a cluster; {HOW_TO_START}")
    if not answers(found):
        source = " (RAY_ADDRESS)" if not address and found == os.environ.get("RAY_ADDRESS") else ""
        raise UserError(f"the cluster's head, {found}{source}, does not answer; {HOW_TO_START}")
    return found


@contextmanager
def attached(address: str | None = None) -> Iterator[None]:
    """Makes this process a driver of the cluster, which only a process on one of its nodes can be."""
    import ray

    from corral.runtime.connection import join

    join(find_head(address))
    try:
        yield
    finally:
        ray.shutdown()


def wait_for_cluster(address: str | None, head_file: Path | None, countdown: Countdown) -> Gcs:
    """Connects to a head that may still be starting."""
    while True:
        try:
            return Gcs(find_head(read_head_file(head_file) if head_file else address))
        except TokenRefused:
            raise
        except UserError as error:
            if countdown.is_over:
                raise RunError(f"after {countdown.timeout_s:g} s: {error}") from None
            countdown.more(f"a cluster: {error}")


def read_head_file(path: Path) -> str:
    """The head's address. The token beside the file is used from here on."""
    found = HeadFile.read(path)
    if token_beside(path).is_file():
        use_token(token_beside(path))
    found.check(path)
    return found.address


# --- which nodes are in the cluster, with their devices and versions: the table of `corral check` and `corral status`


@dataclass(frozen=True)
class ClusterNode:
    entry: NodeEntry
    report: NodeReport | None  # None: the node was started with plain `ray start`

    @property
    def table_row(self) -> tuple[str, ...]:
        entry, report = self.entry, self.report
        memory = report.memory_bytes if report else entry.resources.get("memory", 0)
        names = ", ".join(sorted(set(report.device_names))) if report and entry.resources.get("GPU") else ""
        return (
            "-" if entry.rank is None else str(entry.rank),
            f"{entry.hostname}{' (head)' if entry.is_head else ''}",
            entry.address,
            f"{entry.devices}{f' x {names}' if names else ''}",
            f"{memory / GIB:.0f} GiB",
            *(getattr(report, name) or "-" if report else "?" for name in VERSIONS),
        )


@dataclass(frozen=True)
class ClusterStatus:
    address: str
    dashboard: str | None
    num_nodes: int | None  # that the cluster was started for
    nodes: list[ClusterNode]
    lost: list[NodeEntry]  # were there once, and no other node has their rank now

    @classmethod
    def query(cls, gcs: Gcs) -> Self:
        entries = gcs.nodes()
        alive = [entry for entry in entries if entry.is_alive]
        cluster = gcs.get("cluster") or {}
        # A node without a rank takes nobody's place, or one that joined would hide all others that are gone.
        ranks = {entry.rank for entry in alive if entry.rank is not None}
        addresses = {entry.address for entry in alive}
        dead = {str(entry): entry for entry in entries if not entry.is_alive}
        reports = [(entry, gcs.get(f"node/{entry.id}")) for entry in alive]
        return cls(
            address=gcs.address,
            dashboard=cluster.get("dashboard"),
            num_nodes=cluster.get("num_nodes"),
            # A node that `corral up` has started a moment ago has not stored its report yet.
            nodes=[ClusterNode(one, NodeReport.read(stored)) for one, stored in reports if stored or not one.mark],
            lost=[one for one in dead.values() if one.rank not in ranks and one.address not in addresses],
        )

    @property
    def num_devices(self) -> int:
        return sum(node.entry.devices for node in self.nodes)

    @property
    def missing_ranks(self) -> list[int]:
        present = {node.entry.rank for node in self.nodes}
        return [rank for rank in range(self.num_nodes or 0) if rank not in present]

    @property
    def mixtures(self) -> list[str]:
        """Versions that differ between nodes, which they must not."""
        found = []
        for name in SAME_EVERYWHERE:
            by_version: dict[str, list[str]] = {}
            for node in self.nodes:
                if node.report is not None:
                    by_version.setdefault(getattr(node.report, name), []).append(node.entry.hostname)
            if len(by_version) > 1:
                where = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in by_version.items())
                found.append(f"{name} differs between nodes: {where}")
        return found

    def text(self) -> str:
        lines = format_table([HEADINGS, *(node.table_row for node in self.nodes)])
        devices, nodes = self.num_devices, len(self.nodes)
        lines.append(f"{devices} device{'s' * (devices != 1)} on {nodes} node{'s' * (nodes != 1)}; head {self.address}")
        if self.missing_ranks:
            lines.append(f"missing: rank {', '.join(map(str, self.missing_ranks))} of {self.num_nodes}")
        lines += [f"lost: {node}" for node in self.lost]
        lines += self.mixtures
        if self.dashboard is not None:
            lines.append(f"dashboard {self.dashboard}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        nodes = [
            {
                **{name: value for name, value in asdict(node.entry).items() if name not in ("mark", "is_alive")},
                "devices": node.entry.devices,
                "report": None if node.report is None else asdict(node.report),
            }
            for node in self.nodes
        ]
        return {
            "address": self.address,
            "dashboard": self.dashboard,
            "devices": self.num_devices,
            "nodes": nodes,
            "missing_ranks": self.missing_ranks,
            "lost": [str(node) for node in self.lost],
            "mixtures": self.mixtures,
        }


def format_table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def wait_for_devices(gcs: Gcs, num_devices: int, num_nodes: int, countdown: Countdown) -> tuple[ClusterStatus, str]:
    """Waits for at least so many devices and nodes. Returns what there is, and what is missing after the timeout."""
    while True:
        status = ClusterStatus.query(gcs)
        devices, nodes = status.num_devices, len(status.nodes)
        if devices >= num_devices and nodes >= num_nodes:
            countdown.line.clear()
            return status, ""
        lack = f"{num_devices} devices: {devices} on {nodes} node{'s' * (nodes != 1)}"
        if num_nodes > nodes:
            lack = f"{num_nodes} nodes: {nodes} with {devices} devices"
        if status.missing_ranks:
            lack += f"; rank {', '.join(map(str, status.missing_ranks))} of {status.num_nodes} missing"
        if status.lost:
            lack += f"; lost {', '.join(map(str, status.lost))}"
        is_complete = 0 < num_nodes <= nodes and not status.missing_ranks  # and no node gets more devices with time
        if countdown.is_over or is_complete:
            countdown.line.clear()
            each = ", ".join(f"{node.entry} has {node.entry.devices}" for node in status.nodes)
            when = "with all its nodes" if is_complete else f"after {countdown.timeout_s:g} s"
            return status, f"{when} the cluster does not have {lack} ({each})"
        countdown.more(lack)
