"""Who is in the cluster: the table of `corral check` and `corral status`."""

from dataclasses import asdict, dataclass
from typing import Any

from corral.cluster.gcs import Gcs, NodeEntry
from corral.cluster.report import SAME_EVERYWHERE, NodeReport
from corral.observe.status_line import Countdown
from corral.recipe.errors import RunError

GIB = 2**30
VERSIONS = ("corral", "ray", "torch", "python", "driver")
HEADINGS = ("rank", "host", "address", "devices", "memory", *VERSIONS)


@dataclass(frozen=True)
class Member:
    node: NodeEntry
    report: NodeReport | None
    """None: it was started with plain `ray start`."""


@dataclass(frozen=True)
class Census:
    address: str
    dashboard: str | None
    num_nodes: int | None
    """That were to come."""
    members: list[Member]
    lost: list[NodeEntry]
    """That were there once, and whose rank nobody has now."""

    @property
    def num_devices(self) -> int:
        return sum(member.node.devices for member in self.members)

    @property
    def missing_ranks(self) -> list[int]:
        there = {member.node.rank for member in self.members}
        return [rank for rank in range(self.num_nodes or 0) if rank not in there]

    @property
    def mixtures(self) -> list[str]:
        """Versions that differ between nodes, which they must not."""
        found = []
        for name in SAME_EVERYWHERE:
            by_version: dict[str, list[str]] = {}
            for member in self.members:
                if member.report is not None:
                    by_version.setdefault(getattr(member.report, name), []).append(member.node.hostname)
            if len(by_version) > 1:
                where = "; ".join(f"{version} on {', '.join(hosts)}" for version, hosts in by_version.items())
                found.append(f"{name} differs between nodes: {where}")
        return found

    def text(self) -> str:
        rows = [HEADINGS, *(row_of(member) for member in self.members)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        devices, nodes = self.num_devices, len(self.members)
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
                **{name: value for name, value in asdict(member.node).items() if name not in ("mark", "is_alive")},
                "devices": member.node.devices,
                "report": None if member.report is None else member.report.as_dict(),
            }
            for member in self.members
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


def row_of(member: Member) -> tuple[str, ...]:
    node, report = member.node, member.report
    memory = report.memory_bytes if report else node.resources.get("memory", 0)
    return (
        "-" if node.rank is None else str(node.rank),
        f"{node.hostname}{' (head)' if node.is_head else ''}",
        node.address,
        devices_of(member),
        f"{memory / GIB:.0f} GiB",
        *(getattr(report, name) or "-" if report else "?" for name in VERSIONS),
    )


def devices_of(member: Member) -> str:
    """With their names where they are GPUs."""
    names = set(member.report.device_names) if member.report else set()
    kind = f" x {', '.join(sorted(names))}" if names and member.node.resources.get("GPU") else ""
    return f"{member.node.devices}{kind}"


def take_census(gcs: Gcs) -> Census:
    nodes = gcs.nodes()
    alive = [node for node in nodes if node.is_alive]
    known = gcs.get("cluster") or {}
    ranks = {node.rank for node in alive}
    addresses = {node.address for node in alive}
    lost = {str(node): node for node in nodes if not node.is_alive}
    reports = [(node, gcs.get(f"node/{node.id}")) for node in alive]
    return Census(
        address=gcs.address,
        dashboard=known.get("dashboard"),
        num_nodes=known.get("num_nodes"),
        # One that `corral up` has started a moment ago has not said yet what it is.
        members=[Member(node, NodeReport.read(said)) for node, said in reports if said is not None or not node.mark],
        lost=[node for node in lost.values() if node.rank not in ranks and node.address not in addresses],
    )


def check(gcs: Gcs, num_devices: int, num_nodes: int, countdown: Countdown) -> Census:
    """Waits until at least so many are there. Raises with what is missing, after the time that it has."""
    while True:
        census = take_census(gcs)
        devices, nodes = census.num_devices, len(census.members)
        if devices >= num_devices and nodes >= num_nodes:
            countdown.line.clear()
            return census
        lack = f"{num_devices} devices: {devices} on {nodes} node{'s' * (nodes != 1)}"
        if num_nodes > nodes:
            lack = f"{num_nodes} nodes: {nodes} with {devices} devices"
        if census.missing_ranks:
            lack += f"; rank {', '.join(map(str, census.missing_ranks))} of {census.num_nodes} missing"
        if census.lost:
            lack += f"; lost {', '.join(map(str, census.lost))}"
        is_complete = 0 < num_nodes <= nodes and not census.missing_ranks  # and no node gets more devices with time
        if countdown.is_over or is_complete:
            countdown.line.clear()
            short = ", ".join(f"{member.node} has {member.node.devices}" for member in census.members)
            when = "with all its nodes" if is_complete else f"after {countdown.timeout_s:g} s"
            raise NotThere(f"{when} the cluster does not have {lack} ({short})", census)
        countdown.more(lack)


class NotThere(RunError):
    """With what is there."""

    def __init__(self, message: str, census: Census) -> None:
        super().__init__(message)
        self.census = census
