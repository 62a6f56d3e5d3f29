"""A Ray cluster: finding it or starting one on this machine, and booking its devices."""

import asyncio
import logging
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import torch
from ray._private.services import find_bootstrap_address
from ray.util.placement_group import placement_group, remove_placement_group

from corral.recipe.errors import RunError, UserError
from corral.recipe.schema import Cluster
from corral.runtime.network import answers
from corral.runtime.nodes import Node, arrange
from corral.runtime.remote import first_line

WORKER_SLOT = "corral_device"
"""The resource of a node without GPUs, one per worker: `ray start --resources='{"corral_device": 2}'`."""
SAY_EVERY_S = 5.0
POLL_S = 0.25
PATIENCE_S = 1.0
"""Before anything is said: mostly it does not take that long."""
HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 5,
}
HOW_TO_START = (
    "start one: `ray start --head` on the first node, `ray start --address=FIRST_NODE:6379` on the others (with "
    f"""`--resources='{{"{WORKER_SLOT}": 2}}'` where there are no GPUs), then this command on one of them"""
)


def connect(cluster: Cluster) -> None:
    """To the recipe's cluster, or to one that is started for it. `ray.shutdown` leaves the one and ends the other."""
    if ray.is_initialized():
        address = ray.get_runtime_context().gcs_address
        if not answers(address):
            raise RunError(f"Ray's head node, {address}, does not answer, and without it there is no cluster")
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray._private.worker._worker_logs_enabled = False  # it prints deaths, which are told better here
    address = running_cluster() if cluster.address == "auto" else cluster.address
    with signal_handlers_kept():
        if address is not None and answers(address):
            try:
                ray.init(address=address, **QUIET)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UserError(
                    f"the Ray cluster at {address} cannot be used from here: {first_line(error)}"
                ) from error
            return
        if cluster.address != "auto":
            raise UserError(f"`cluster.address`: there is no Ray cluster at {address}; {HOW_TO_START}")
        if cluster.nodes > 1:
            lack = f"`cluster.nodes` is {cluster.nodes}, and no Ray cluster runs on this machine"
            raise UserError(f"{lack}; {HOW_TO_START}")
        start_here(cluster)


QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}


def running_cluster() -> str | None:
    """As `RAY_ADDRESS` says, else one that was started with `ray start`. Not one that another run started for itself
    and will end, which is what Ray's own `auto` would take."""
    found: str | None = os.environ.get("RAY_ADDRESS") or find_bootstrap_address(None)
    return found


def start_here(cluster: Cluster) -> None:
    """On loopback: nobody else is to reach it."""
    gpus = torch.cuda.device_count()
    try:
        ray.init(
            address="local",
            num_gpus=gpus,
            resources=None if gpus else {WORKER_SLOT: cluster.devices_per_node},
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _system_config=HEALTH_CHECKS,
            **QUIET,
        )
    except Exception as error:  # Ray has no class of its own for this
        raise RunError(f"Ray could not be started on this machine: {first_line(error)}") from error


@contextmanager
def signal_handlers_kept() -> Iterator[None]:
    """Ray sets its own for SIGTERM."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


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
    """This process's, without what belongs to the Python installation, which may lie elsewhere on another node."""
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    entries = dict.fromkeys(os.path.abspath(entry) for entry in sys.path)
    return [entry for entry in entries if os.path.isdir(entry) and not entry.startswith(installed)]


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
