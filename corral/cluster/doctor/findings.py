"""What a check has to say: how bad, what, where, and what to do about it."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Level = Literal["ok", "note", "warning", "error"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note", "ok")
"""error: a run will fail or learn something wrong. warning: it may, or is slow. note: good to know."""
NAMED = 4
"""Nodes that are named before it says how many more there are."""


@dataclass(frozen=True)
class Place:
    """A node."""

    host: str
    address: str = ""
    rank: int | None = None

    def __str__(self) -> str:
        return f"{self.host} ({self.address})" if self.address else self.host


@dataclass(frozen=True)
class Finding:
    level: Level
    check: str
    what: str
    fix: str = ""
    nodes: tuple[Place, ...] = ()
    """None: the cluster as a whole, or the recipe."""
    device: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def at(place: Place, findings: Iterable[Finding]) -> list[Finding]:
    """The findings of a node's own checks, with the node."""
    return [replace(finding, nodes=(place,)) for finding in findings]


def hosts(places: Sequence[Place]) -> str:
    names = [place.host for place in places]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def num_of(level: Level, findings: Iterable[Finding]) -> int:
    return sum(finding.level == level for finding in findings)
