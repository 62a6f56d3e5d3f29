"""What the tests of the doctor do on a host."""

from typing import Any

import ray

from corral.cluster.doctor.crowd import Cluster
from corral.cluster.doctor.diagnosis import Order
from corral.cluster.doctor.findings import Place
from corral.cluster.doctor.survey import question_for
from corral.cluster.reach import reach
from corral.runtime.connection import join

STARTED: list[Cluster] = []


async def start_agents() -> list[float]:
    """On all nodes. What their clocks say."""
    join(reach())
    entries = {Place(entry["NodeManagerHostname"], entry["NodeManagerAddress"]): entry for entry in ray.nodes()}
    STARTED.append(Cluster.start(entries, lambda place: question_for(place, Order(), None, reach(), None)))
    return sorted(STARTED[0].ask("clock", limit_s=60).values())


async def ask_agents() -> dict[str, Any]:
    answers = STARTED[0].ask("clock", limit_s=2)
    return {
        "answered": sorted(place.host for place in answers),
        "left": sorted(place.host for place in STARTED[0].places),
        "findings": [finding.as_dict() for finding in STARTED[0].findings],
    }
