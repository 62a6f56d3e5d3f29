"""The devices of a Ray cluster: waiting for them and booking them."""

import asyncio
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from corral.recipe.errors import RunError, UserError
from corral.recipe.schema import Cluster
from corral.runtime.nodes import WORKER_SLOT, Node, arrange

SAY_EVERY_S = 5.0
POLL_S = 0.25
PATIENCE_S = 1.0
"""Before anything is said: mostly it does not take that long."""


def remote_class(kind: type, where: Any, *, py_executable: str | None = None, **options: Any) -> Any:
    """A class whose objects are actors, with the controller's import path: functions that a recipe names live there,
    perhaps Corral too."""
    variables = {
        "PYTHONPATH": os.pathsep.join(own_import_path()),
        # Torch warns of host names that cannot be resolved, and such.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }
    environment: dict[str, Any] = {"env_vars": variables}
    if py_executable is not None:
        environment["py_executable"] = py_executable
    return ray.remote(kind).options(num_cpus=0, scheduling_strategy=where, runtime_env=environment, **options)


def own_import_path() -> list[str]:
    """This process's, without what may lie elsewhere on another node: what belongs to the Python installation, and what
    Ray itself puts on each node."""
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    entries = dict.fromkeys(os.path.abspath(entry) for entry in sys.path)
    own = [entry for entry in entries if os.path.isdir(entry) and not entry.startswith(installed)]
    return [entry for entry in own if not given_by_ray(Path(entry))]


def given_by_ray(path: Path) -> bool:
    """Whether it is in a job's copy of the folder that was submitted, or another thing that a `runtime_env` names. Ray
    makes one on each node, and lets every process of the job find its own."""
    folder = Path(ray._private.worker._global_node.get_runtime_env_dir_path())
    return path.resolve().is_relative_to(folder.resolve())


# --- devices


def device_resource(entries: Sequence[Mapping[str, Any]]) -> str:
    return "GPU" if any(entry["Resources"].get("GPU") for entry in entries if entry["Alive"]) else WORKER_SLOT


async def find_nodes(cluster: Cluster, without: frozenset[str], say: Callable[[str], None]) -> tuple[str, list[Node]]:
    """The resource that a device is, and the nodes, once all that were not lost are there."""
    fewest = cluster.min_nodes or cluster.nodes
    waiting = Waiting(cluster.start_timeout_s, say)
    while True:
        entries = ray.nodes()
        resource = device_resource(entries)
        large = [entry for entry in entries if entry["Resources"].get(resource, 0) >= cluster.devices_per_node]
        dead = [entry for entry in entries if not entry["Alive"]]
        nodes = arrange([*dead, *large], cluster.nodes, without)
        if len(nodes) >= cluster.nodes - len(without) and len(nodes) >= fewest:
            return resource, nodes
        lack = f"{table(resource)}; needed: {cluster.nodes} nodes with {cluster.devices_per_node} devices each"
        if without:
            lack += f", at least {fewest} (`cluster.min_nodes`), and lost: {', '.join(sorted(without))}"
        if waiting.is_over:
            if len(nodes) >= fewest:
                return resource, nodes
            raise (RunError if without else UserError)(f"the Ray cluster is too small: {lack}")
        await waiting.more(f"waiting for nodes: {lack}")


async def book(
    cluster: Cluster, resource: str, nodes: Sequence[Node], say: Callable[[str], None]
) -> tuple[Any, dict[int, int]]:
    """One bundle of a placement group for each device that is used, on the node that it is numbered for. Returns the
    group, and the bundle of each device."""
    bundles = [{resource: 1, f"node:{node.address}": 0.001} for node in nodes for _ in node.devices]
    devices = [device for node in nodes for device in node.devices]
    group = placement_group(bundles, strategy="PACK")
    waiting = Waiting(cluster.start_timeout_s, say)
    try:
        while not await asyncio.to_thread(group.wait, POLL_S):
            needed = ", ".join(f"{node} {len(node.devices)}" for node in nodes)
            lack = f"{table(resource)}; needed: {needed}"
            if waiting.is_over:
                raise UserError(
                    f"devices of the Ray cluster were not free within {cluster.start_timeout_s:g} s "
                    f"(`cluster.start_timeout_s`): {lack}; `ray status` shows who has them"
                )
            await waiting.more(f"waiting for devices: {lack}")
    except BaseException:
        remove_placement_group(group)
        raise
    return group, {device: bundle for bundle, device in enumerate(devices)}


class Waiting:
    """Says now and then what is being waited for."""

    def __init__(self, timeout_s: float, say: Callable[[str], None]) -> None:
        self.deadline, self.say = time.monotonic() + timeout_s, say
        self.next = time.monotonic() + PATIENCE_S

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.deadline

    async def more(self, message: str) -> None:
        if time.monotonic() >= self.next:
            self.say(message)
            self.next = time.monotonic() + SAY_EVERY_S
        await asyncio.sleep(POLL_S)


def table(resource: str) -> str:
    """Every node with its devices, and how many of them are free."""
    free = ray._private.state.available_resources_per_node()
    rows = [
        f"{entry['NodeManagerHostname']} ({entry['NodeManagerAddress']}) has {entry['Resources'].get(resource, 0):g} "
        f"devices, {free.get(entry['NodeID'], {}).get(resource, 0):g} free"
        for entry in ray.nodes()
        if entry["Alive"]
    ]
    return "; ".join(rows)
