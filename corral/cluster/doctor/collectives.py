"""How fast the nodes sum a tensor together, pair by pair: what training and weight transfer wait for.

Pairs are drawn up as in a tournament: in each round every node is in one pair at most, and so disturbs no other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from corral.cluster.doctor.findings import Finding, Place

FAR_SLOWER = 1 / 3
"""Of the median."""
MOST_IN_TABLE = 8


@dataclass(frozen=True)
class Pair:
    one: Place
    other: Place
    """The same: between the GPUs of the node."""
    backend: str
    interface: str = ""
    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    error: str = ""

    @property
    def words(self) -> str:
        if self.one == self.other:
            return f"the GPUs of {self.one.host}"
        return f"{self.one.host} and {self.other.host}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "nodes": [self.one.host, self.other.host],
            "backend": self.backend,
            "interface": self.interface,
            "latency_s": self.latency_s,
            "bytes_per_s": self.bytes_per_s,
            "error": self.error,
        }


def rounds(num_players: int) -> list[list[tuple[int, int]]]:
    """All pairs in as few rounds as possible: one player stays, the others move on by one place (the circle method)."""
    players: list[int | None] = list(range(num_players))
    if num_players % 2:
        players.append(None)
    half, found = len(players) // 2, []
    for _ in range(len(players) - 1):
        facing = zip(players[:half], reversed(players[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return [pairs for pairs in found if pairs]


def check_pairs(pairs: Sequence[Pair]) -> Iterator[Finding]:
    for backend in dict.fromkeys(pair.backend for pair in pairs):
        yield from check_backend([pair for pair in pairs if pair.backend == backend])


def check_backend(pairs: Sequence[Pair]) -> Iterator[Finding]:
    backend = pairs[0].backend
    for pair in pairs:
        if pair.error:
            what = f"{pair.words} cannot sum a tensor together with {backend}: {pair.error}"
            yield Finding("error", "all-reduce", what, remedy(pair), tuple(dict.fromkeys((pair.one, pair.other))))
    for done in (
        [pair for pair in pairs if not pair.error and pair.one != pair.other],
        [pair for pair in pairs if not pair.error and pair.one == pair.other],
    ):
        yield from compare(done)


def compare(done: Sequence[Pair]) -> Iterator[Finding]:
    if not done:
        return
    usual = median(pair.bytes_per_s for pair in done)
    slow = [pair for pair in done if pair.bytes_per_s < FAR_SLOWER * usual]
    for pair in slow:
        what = f"{pair.words}: {speed(pair.bytes_per_s)} with {pair.backend}, and the median is {speed(usual)}"
        fix = "look at cable, switch port and interface speed (ethtool) of the node that all slow pairs share"
        yield Finding("warning", "all-reduce", what, fix, tuple(dict.fromkeys((pair.one, pair.other))))
    if not slow:
        kind = "inside nodes" if done[0].one == done[0].other else f"between {len(done)} pair{'s' * (len(done) > 1)}"
        latency = max(pair.latency_s for pair in done)
        what = f"{done[0].backend} {kind}: {speed(usual)} (median), {latency * 1e6:.0f} µs at most"
        yield Finding("ok", "all-reduce", what)


def remedy(pair: Pair) -> str:
    if pair.backend == "nccl":
        return (
            "run it again with NCCL_DEBUG=INFO; often /dev/shm, NCCL_SOCKET_IFNAME, or InfiniBand that one node lacks"
        )
    return "a firewall, or the wrong network: GLOO_SOCKET_IFNAME chooses another"


def speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.1f} MB/s"


def table(pairs: Sequence[Pair]) -> list[str]:
    """Of the pairs of nodes, for each backend; with many nodes only of the slowest."""
    lines = []
    for backend in dict.fromkeys(pair.backend for pair in pairs):
        own = [pair for pair in pairs if pair.backend == backend and pair.one != pair.other]
        places = list(dict.fromkeys(place for pair in own for place in (pair.one, pair.other)))
        if not own:
            continue
        interfaces = ", ".join(dict.fromkeys(pair.interface for pair in own if pair.interface))
        lines.append(f"{backend} all-reduce between pairs" + (f", over {interfaces}" if interfaces else ""))
        lines += matrix(own, places) if len(places) <= MOST_IN_TABLE else slowest(own)
    return lines


def matrix(pairs: Sequence[Pair], places: Sequence[Place]) -> list[str]:
    cells = {(pair.one, pair.other): cell(pair) for pair in pairs}
    places = sorted(places, key=lambda place: (place.rank is None, place.rank or 0, place.host))
    width = max(len(text) for text in [*cells.values(), *(place.host for place in places)])
    name = max(len(place.host) for place in places)
    lines = [" " * name + "".join(f"  {place.host:>{width}}" for place in places[:-1])]
    for row, place in enumerate(places[1:], start=1):
        found = [cells.get((other, place)) or cells.get((place, other)) or "-" for other in places[:row]]
        lines.append(f"{place.host:<{name}}" + "".join(f"  {text:>{width}}" for text in found))
    return lines


def slowest(pairs: Sequence[Pair]) -> list[str]:
    ordered = sorted(pairs, key=lambda pair: pair.bytes_per_s)[:MOST_IN_TABLE]
    return ["the slowest:", *(f"  {pair.words}  {cell(pair)}" for pair in ordered)]


def cell(pair: Pair) -> str:
    return "failed" if pair.error else f"{speed(pair.bytes_per_s)} {pair.latency_s * 1e6:.0f} µs"
