"""Lets nodes meet in pairs, and the GPUs of a node among themselves, to measure how fast they sum a tensor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from corral.cluster.doctor.agent import Examined
from corral.cluster.doctor.collectives import Pair, rounds
from corral.cluster.doctor.crowd import Crowd
from corral.cluster.doctor.findings import Place

PAIR_S = 30.0
"""For two nodes to find each other and sum a tensor."""
SILENT = "no answer"


@dataclass(frozen=True)
class Meetings:
    crowd: Crowd
    examined: Mapping[Place, Examined]
    limit_s: float
    say: Callable[[str], None]

    def all_pairs(self, backend: str, broken: set[frozenset[Place]]) -> list[Pair]:
        """`broken`: pairs that cannot talk, and are left out."""
        able = [place for place in self.crowd.places if backend == "gloo" or self.examined[place].torch.available]
        found = []
        for number, meetings in enumerate(rounds(len(able)), start=1):
            pairs = [(able[one], able[other]) for one, other in meetings]
            pairs = [pair for pair in pairs if frozenset(pair) not in broken and set(pair) <= set(self.crowd.places)]
            self.say(f"{backend} all-reduce, round {number}: {len(pairs)} pairs")
            found += self.round(pairs, backend)
        return found

    def round(self, pairs: Sequence[tuple[Place, Place]], backend: str) -> list[Pair]:
        """At the same time: each node is in one pair at most."""
        limit_s = min(PAIR_S, self.limit_s)
        ports = self.crowd.ask(
            "open_meeting", lambda _: [limit_s], only=[one for one, _ in pairs], limit_s=limit_s + self.limit_s
        )
        meeting = {place: pair for pair in pairs if isinstance(ports.get(pair[0]), int) for place in pair}

        def arguments(place: Place) -> list[Any]:
            pair = meeting[place]
            return [pair[0].address, ports[pair[0]], pair.index(place), 2, backend, limit_s]

        answers = self.crowd.ask("all_reduce", arguments, only=list(meeting), limit_s=limit_s + self.limit_s)
        return [
            result(Pair(one, other, backend, self.examined[one].interface), ports.get(one, SILENT), answers)
            for one, other in pairs
        ]

    def inside(self, backend: str) -> list[Pair]:
        """Between the GPUs of each node that has several."""
        sizes = {place: self.examined[place].torch.num_devices for place in self.crowd.places}
        several = [place for place, size in sizes.items() if size > 1]
        if not several:
            return []
        self.say(f"{backend} all-reduce inside nodes")
        limit_s = min(2 * PAIR_S, self.limit_s)
        answers = self.crowd.ask(
            "all_reduce_inside",
            lambda place: [sizes[place], backend, limit_s],
            only=several,
            limit_s=2 * limit_s + self.limit_s,
        )
        return [result(Pair(place, place, backend), 0, answers) for place in several]


def result(pair: Pair, port: int | str, answers: Mapping[Place, Any]) -> Pair:
    """From what the two have answered; errors are text."""
    said = [port, *(answers.get(place, SILENT) for place in (pair.one, pair.other))]
    errors = list(dict.fromkeys(error for error in said if isinstance(error, str)))
    if errors:
        known = [error for error in errors if error != SILENT] or errors
        return replace(pair, error="; ".join(known))
    latency_s, bytes_per_s = answers[pair.one]
    return replace(pair, latency_s=latency_s, bytes_per_s=bytes_per_s)
