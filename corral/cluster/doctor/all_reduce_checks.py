"""How fast the nodes sum a tensor together, pair by pair: what training and weight transfer wait for.

Pairs are scheduled as in a tournament: in each round every node is in one pair at most, and so disturbs no other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from corral.cluster.doctor.findings import Finding, NodeRef, PairSpeed, format_speed
from corral.cluster.doctor.node_inspector import NodeInspector, NodeState
from corral.cluster.doctor.node_set import NodeSet, same_for_all

FAR_SLOWER = 1 / 3  # of the median
PAIR_S = 30.0  # for two nodes to connect and sum a tensor
SILENT = "no answer"


@dataclass(frozen=True)
class PairTests:
    """Measures pairs of nodes, and the GPUs inside of each node."""

    nodes: NodeSet
    states: Mapping[NodeRef, NodeState]
    limit_s: float
    report: Callable[[str], None]

    def all_pairs(self, backend: str, broken: set[frozenset[NodeRef]]) -> list[PairSpeed]:
        """`broken`: pairs that cannot connect, and are left out."""
        able = [node for node in self.nodes.refs if backend == "gloo" or self.states[node].torch.available]
        found = []
        for number, pairs_of_round in enumerate(pair_rounds(len(able)), start=1):
            pairs = [(able[one], able[other]) for one, other in pairs_of_round]
            pairs = [pair for pair in pairs if frozenset(pair) not in broken and set(pair) <= set(self.nodes.refs)]
            self.report(f"{backend} all-reduce, round {number}: {len(pairs)} pairs")
            found += self.one_round(pairs, backend)
        return found

    def one_round(self, pairs: Sequence[tuple[NodeRef, NodeRef]], backend: str) -> list[PairSpeed]:
        """Measures pairs at the same time: each node is in one of them at most."""
        limit_s = min(PAIR_S, self.limit_s)
        wait_s = limit_s + self.limit_s
        first = [one for one, _ in pairs]
        ports = self.nodes.call(NodeInspector.open_store, same_for_all(limit_s), only=first, limit_s=wait_s)
        pair_of = {node: pair for pair in pairs if isinstance(ports.get(pair[0]), int) for node in pair}

        def arguments(node: NodeRef) -> list[Any]:
            pair = pair_of[node]
            return [pair[0].address, ports[pair[0]], pair.index(node), 2, backend, limit_s]

        answers = self.nodes.call(NodeInspector.all_reduce, arguments, only=list(pair_of), limit_s=wait_s)
        return [
            pair_result(PairSpeed(one, other, backend, self.states[one].interface), ports.get(one, SILENT), answers)
            for one, other in pairs
        ]

    def inside(self, backend: str) -> list[PairSpeed]:
        """Measures the GPUs of each node that has several."""
        sizes = {node: self.states[node].torch.num_devices for node in self.nodes.refs}
        several = [node for node, size in sizes.items() if size > 1]
        if not several:
            return []
        self.report(f"{backend} all-reduce inside nodes")
        limit_s = min(2 * PAIR_S, self.limit_s)
        answers = self.nodes.call(
            NodeInspector.all_reduce_inside,
            lambda node: [sizes[node], backend, limit_s],
            only=several,
            limit_s=2 * limit_s + self.limit_s,
        )
        return [pair_result(PairSpeed(node, node, backend), 0, answers) for node in several]


def pair_rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """All pairs in as few rounds as possible: one node stays, the others move on by one place (the circle method)."""
    nodes: list[int | None] = list(range(num_nodes))
    if num_nodes % 2:
        nodes.append(None)
    half, found = len(nodes) // 2, []
    for _ in range(len(nodes) - 1):
        facing = zip(nodes[:half], reversed(nodes[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        nodes = [nodes[0], nodes[-1], *nodes[1:-1]]
    return [pairs for pairs in found if pairs]


def pair_result(pair: PairSpeed, port: int | str, answers: Mapping[NodeRef, Any]) -> PairSpeed:
    """The pair with what its nodes have measured. A text instead of numbers is an error."""
    results = [port, *(answers.get(node, SILENT) for node in (pair.one, pair.other))]
    errors = list(dict.fromkeys(error for error in results if isinstance(error, str)))
    if errors:
        known = [error for error in errors if error != SILENT] or errors
        return replace(pair, error="; ".join(known))
    latency_s, bytes_per_s = answers[pair.one]
    return replace(pair, latency_s=latency_s, bytes_per_s=bytes_per_s)


def check_pairs(pairs: Sequence[PairSpeed]) -> Iterator[Finding]:
    for backend in dict.fromkeys(pair.backend for pair in pairs):
        own = [pair for pair in pairs if pair.backend == backend]
        for pair in own:
            if pair.error:
                what = f"{pair} cannot sum a tensor together with {backend}: {pair.error}"
                fix = "a firewall, or the wrong network: GLOO_SOCKET_IFNAME chooses another"
                if backend == "nccl":
                    fix = (
                        "run it again with NCCL_DEBUG=INFO; often /dev/shm, NCCL_SOCKET_IFNAME, or InfiniBand that "
                        "one node lacks"
                    )
                yield Finding("error", "all-reduce", what, fix, tuple(dict.fromkeys((pair.one, pair.other))))
        for is_inside in (False, True):
            yield from compare_speeds([pair for pair in own if not pair.error and pair.is_inside == is_inside])


def compare_speeds(pairs: Sequence[PairSpeed]) -> Iterator[Finding]:
    if not pairs:
        return
    usual = median(pair.bytes_per_s for pair in pairs)
    slow = [pair for pair in pairs if pair.bytes_per_s < FAR_SLOWER * usual]
    for pair in slow:
        speeds = f"{format_speed(pair.bytes_per_s)} with {pair.backend}, and the median is {format_speed(usual)}"
        fix = "look at cable, switch port and interface speed (ethtool) of the node that all slow pairs share"
        yield Finding("warning", "all-reduce", f"{pair}: {speeds}", fix, tuple(dict.fromkeys((pair.one, pair.other))))
    if not slow:
        kind = "inside nodes" if pairs[0].is_inside else f"between {len(pairs)} pair{'s' * (len(pairs) > 1)}"
        latency = max(pair.latency_s for pair in pairs)
        what = f"{pairs[0].backend} {kind}: {format_speed(usual)} (median), {latency * 1e6:.0f} µs at most"
        yield Finding("ok", "all-reduce", what)
