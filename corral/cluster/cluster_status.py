"""Which nodes are in the cluster, with their devices and versions: the table of `corral check` and `corral status`."""

from dataclasses import asdict, dataclass
from typing import Any, Self

from corral.cluster.gcs import Gcs, NodeEntry
from corral.cluster.node_report import SAME_EVERYWHERE, NodeReport
from corral.observe.status_line import Countdown

GIB = 2**30
VERSIONS = ("corral", "ray", "torch", "python", "driver")
HEADINGS = ("rank", "host", "address", "devices", "memory", *VERSIONS)


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
        ranks, addresses = {entry.rank for entry in alive}, {entry.address for entry in alive}
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
    """Waits until the cluster has at least so many devices and nodes, or the timeout is over. Returns what it has, and
    an error with what is missing then."""
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
