"""What the checks have found, as data and as text: how bad, what, on which nodes, and what to do about it."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

FindingLevel = Literal["ok", "note", "warning", "error"]
LEVELS: tuple[FindingLevel, ...] = ("error", "warning", "note", "ok")
"""error: a run will fail or train something wrong. warning: it may, or is slow. note: good to know."""
MAX_HOSTS = 4  # that are named before it says how many more there are
MAX_NODES_IN_HEADER = 8
MAX_NODES_IN_TABLE = 8


@dataclass(frozen=True)
class NodeRef:
    host: str
    address: str = ""
    rank: int | None = None

    def __str__(self) -> str:
        return f"{self.host} ({self.address})" if self.address else self.host


@dataclass(frozen=True)
class Finding:
    level: FindingLevel
    check: str
    what: str
    fix: str = ""
    nodes: tuple[NodeRef, ...] = ()  # none: the cluster as a whole, or the recipe
    device: str | None = None


@dataclass(frozen=True)
class GroupSpeed:
    """How fast devices sum a tensor and exchange its parts: one of each of two nodes, or all devices of the nodes."""

    nodes: tuple[NodeRef, ...]
    backend: str
    interface: str = ""
    num_devices: int = 2
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    exchanged_per_s: float = 0.0
    transports: Sequence[str] = ()
    """That NCCL chose: P2P, SHM, NET/IB, NET/Socket."""
    error: str = ""

    def __str__(self) -> str:
        if self.is_pair:
            return " and ".join(node.host for node in self.nodes)
        return f"the GPUs of {self.nodes[0].host}" if len(self.nodes) == 1 else f"all {self.num_devices} GPUs"

    @property
    def is_pair(self) -> bool:
        return len(self.nodes) == self.num_devices == 2

    @property
    def kind(self) -> str:
        if self.is_pair:
            return "between pairs"
        return "inside nodes" if len(self.nodes) == 1 else f"between {self}"

    @property
    def cell(self) -> str:
        return "failed" if self.error else f"{format_speed(self.bytes_per_s)} {self.latency_s * 1e6:.0f} µs"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "nodes": [node.host for node in self.nodes]}


@dataclass
class Diagnosis:
    nodes: list[NodeRef]
    findings: list[Finding] = field(default_factory=list)
    speeds: list[GroupSpeed] = field(default_factory=list)

    @property
    def num_errors(self) -> int:
        return sum(finding.level == "error" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "nodes": [{"rank": node.rank, "host": node.host, "address": node.address} for node in self.nodes],
            "findings": [asdict(finding) for finding in self.findings],
            "speeds": [group.as_dict() for group in self.speeds],
        }

    def text(self) -> str:
        """What is wrong first, with the fix below it; what is well in one line per check."""
        names = dict.fromkeys(finding.check for finding in self.findings)
        width = max((len(name) for name in names), default=0)
        level_width = max(map(len, LEVELS))
        lines = [self._header(), ""]
        merged = {level: merge_findings(one for one in self.findings if one.level == level) for level in LEVELS[:-1]}
        for level, found in merged.items():
            for finding, nodes in found:
                where = self._where(finding, nodes)
                lines.append(f"{level:<{level_width}}  {finding.check:<{width}}  {where}{finding.what}")
                if finding.fix:
                    lines.append(f"{'':<{level_width}}  {'':<{width}}  fix: {finding.fix}")
        for name in names:
            passed = [finding for finding in self.findings if finding.check == name and finding.level == "ok"]
            if passed:
                lines.append(f"{'ok':<{level_width}}  {name:<{width}}  {self._summary(passed)}")
        if pairs := format_pairs(self.speeds):
            lines += ["", *pairs]
        counts = {level: len(found) for level, found in merged.items()}
        verdict = ", ".join(f"{number} {level}{'s' * (number != 1)}" for level, number in counts.items() if number)
        return "\n".join([*lines, "", verdict or "nothing to object to"])

    def _header(self) -> str:
        if len(self.nodes) == 1 and not self.nodes[0].address:
            return f"this node, {self.nodes[0].host}"
        named = ", ".join(f"{node.rank} {node}" for node in self.nodes[:MAX_NODES_IN_HEADER])
        left = len(self.nodes) - MAX_NODES_IN_HEADER
        return f"{len(self.nodes)} node{'s' * (len(self.nodes) != 1)}: {named}{f' and {left} more' if left > 0 else ''}"

    def _where(self, finding: Finding, nodes: Sequence[NodeRef]) -> str:
        """`h1, h2: `; nothing where there is only one node, or the text has the names."""
        where = ""
        named = finding.what.split(":")[0].split()
        if nodes and len(self.nodes) > 1 and not all(node.host in named for node in nodes):
            where = "all nodes" if set(nodes) == set(self.nodes) else format_hosts(nodes)
        parts = [part for part in (where, finding.device) if part]
        return f"{', '.join(parts)}: " if parts else ""

    def _summary(self, passed: Sequence[Finding]) -> str:
        """One check on all nodes: the text of all if it is the same, else that of the first."""
        texts = list(dict.fromkeys(finding.what for finding in passed))
        nodes = list(dict.fromkeys(node for finding in passed for node in finding.nodes))
        everywhere = set(self.nodes)
        if len(self.nodes) == 1 or all(set(finding.nodes) in (set(), everywhere) for finding in passed):
            return "; ".join(texts)
        if len(texts) == 1:
            return texts[0] + ("" if set(nodes) == everywhere else f" (on {format_hosts(nodes)})")
        on = "on all nodes" if set(nodes) == everywhere else f"on {format_hosts(nodes)}"
        return f"{on}; {passed[0].nodes[0].host}: {passed[0].what}"


def at_node(node: NodeRef, findings: Iterable[Finding]) -> list[Finding]:
    """The findings of a node's own checks, with the node."""
    return [replace(finding, nodes=(node,)) for finding in findings]


def format_hosts(nodes: Iterable[NodeRef]) -> str:
    return format_some([node.host for node in nodes], MAX_HOSTS)


def format_some(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def merge_findings(findings: Iterable[Finding]) -> list[tuple[Finding, list[NodeRef]]]:
    """Findings that are the same on several nodes, as one with those nodes."""
    same: dict[tuple[str, ...], tuple[Finding, list[NodeRef]]] = {}
    for finding in findings:
        key = (finding.check, finding.what, finding.fix, finding.device or "")
        _, nodes = same.setdefault(key, (finding, []))
        nodes += [node for node in finding.nodes if node not in nodes]
    return list(same.values())


def format_speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.1f} MB/s"


def format_pairs(groups: Sequence[GroupSpeed]) -> list[str]:
    """A table of the pairs of nodes for each backend; with many nodes only the slowest."""
    lines = []
    for backend in dict.fromkeys(group.backend for group in groups):
        own = [group for group in groups if group.backend == backend and group.is_pair]
        if not own:
            continue
        interfaces = ", ".join(dict.fromkeys(pair.interface for pair in own if pair.interface))
        lines.append(f"{backend} all-reduce between pairs" + (f", over {interfaces}" if interfaces else ""))
        nodes = {node for pair in own for node in pair.nodes}
        if len(nodes) <= MAX_NODES_IN_TABLE:
            lines += format_matrix(own, sorted(nodes, key=lambda node: (node.rank is None, node.rank or 0, node.host)))
        else:
            slowest = sorted(own, key=lambda pair: pair.bytes_per_s)[:MAX_NODES_IN_TABLE]
            lines += ["the slowest:", *(f"  {pair}  {pair.cell}" for pair in slowest)]
    return lines


def format_matrix(pairs: Sequence[GroupSpeed], nodes: Sequence[NodeRef]) -> list[str]:
    cells = {frozenset(pair.nodes): pair.cell for pair in pairs}
    width = max(len(text) for text in [*cells.values(), *(node.host for node in nodes)])
    name = max(len(node.host) for node in nodes)
    lines = [" " * name + "".join(f"  {node.host:>{width}}" for node in nodes[:-1])]
    for row, node in enumerate(nodes[1:], start=1):
        found = [cells.get(frozenset((other, node)), "-") for other in nodes[:row]]
        lines.append(f"{node.host:<{name}}" + "".join(f"  {text:>{width}}" for text in found))
    return lines
