"""What the tests of the doctor do on a host."""

from dataclasses import asdict
from functools import partial
from typing import Any

import ray
from deadlines import within

from corral.cluster.doctor.diagnose import DoctorOptions, request_for
from corral.cluster.doctor.findings import NodeRef
from corral.cluster.doctor.node_inspector import ClusterNodes, NodeInspector
from corral.cluster.gcs import find_head
from corral.runtime.connection import join

STARTED: list[ClusterNodes] = []


async def start_inspectors() -> list[float]:
    """Starts one on all nodes. Returns what their clocks say."""
    head = find_head()
    join(head)
    entries = {NodeRef(entry["NodeManagerHostname"], entry["NodeManagerAddress"]): entry for entry in ray.nodes()}
    request = partial(request_for, options=DoctorOptions(), plan=None, cluster=head)
    STARTED.append(ClusterNodes(entries, request, limit_s=within(60)))
    return sorted(STARTED[0].call(NodeInspector.clock).values())


async def call_inspectors() -> dict[str, Any]:
    answers = STARTED[0].call(NodeInspector.clock, limit_s=2)
    return {
        "answered": sorted(node.host for node in answers),
        "left": sorted(node.host for node in STARTED[0].refs),
        "findings": [asdict(finding) for finding in STARTED[0].findings],
    }
