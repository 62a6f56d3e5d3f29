"""What the doctor is asked, and what it has found."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from corral.cluster.doctor.collectives import Pair
from corral.cluster.doctor.findings import Finding, Place


@dataclass(frozen=True)
class Order:
    """What the user wants to know."""

    recipe: Path | None = None
    overrides: Sequence[str] = ()
    shared: Sequence[str] = ()
    limit_s: float = 120.0
    say: Callable[[str], None] = lambda what: None


@dataclass
class Diagnosis:
    places: list[Place]
    findings: list[Finding] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "nodes": [{"rank": place.rank, "host": place.host, "address": place.address} for place in self.places],
            "findings": [finding.as_dict() for finding in self.findings],
            "pairs": [pair.as_dict() for pair in self.pairs],
        }
