"""Connects to a Ray cluster: the one that is meant, or one that is started on this machine for the time of a run."""

import fcntl
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._common.utils import get_ray_address_file

from corral.recipe.errors import RunError, UserError, first_line
from corral.recipe.schema import Cluster
from corral.runtime.membership import find_membership, state_folder
from corral.runtime.network import answers
from corral.runtime.nodes import SHARED_GPUS, WORKER_SLOT
from corral.runtime.token import reload_token, use_token_of

logger = logging.getLogger(__name__)

RAY_SETTINGS: dict[str, int | bool] = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 5,
    "prestart_worker_first_driver": False,
}
"""Settings of a Ray that Corral starts. With the first four it notices within ten seconds that a node is gone; by
default a cable that was pulled takes it a minute. With the last it starts no Python process per core in advance: each
takes most of a second of CPU time, and none is ever used, since Corral's workers have an environment of their own."""
CLOSED = {
    "RAY_enable_metrics_collection": "false",
    "DASHBOARD_METRIC_PORT": "-1",
    "AUTOSCALER_METRIC_PORT": "-1",
}
"""Ray's metrics servers need no token, so they are off. With port -1 a server logs that it cannot listen."""
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray takes 127.0.0.1 for the machine's real address otherwise, and listens on all networks."""
MORE_NODES: list[Any] = []
"""Nodes that this process has started beside the first one (`cluster.address: here`)."""
STORE_BYTES = 256 << 20
"""Object store of each of them."""
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
HOW_TO_START = "start one with `corral up` on each node, then this command on one of them"


def connect(cluster: Cluster) -> None:
    """Connects to the recipe's cluster, or to one that is started for it. `disconnect` leaves the one and ends the
    other."""
    if ray.is_initialized():
        address = ray.get_runtime_context().gcs_address
        if not answers(address):
            raise RunError(f"Ray's head node, {address}, does not answer, and without it there is no cluster")
        return
    found = None if cluster.is_here else find_cluster(None if cluster.address == "auto" else cluster.address)
    if found is not None and answers(found):
        join(found)
        return
    if not cluster.is_here and cluster.address != "auto":
        raise UserError(f"`cluster.address`: there is no Ray cluster at {found}; {HOW_TO_START}")
    if found is not None and found == os.environ.get("RAY_ADDRESS") != "local":  # `local` asks Ray to start one
        raise UserError(f"RAY_ADDRESS: there is no Ray cluster at {found}; unset it, or {HOW_TO_START}")
    if cluster.nodes > 1 and not cluster.is_here:
        lack = f"`cluster.nodes` is {cluster.nodes}, and this machine is not part of a Ray cluster"
        raise UserError(f"{lack}; {HOW_TO_START}")
    with quietly():
        start_here(cluster)


def find_cluster(address: str | None) -> str | None:
    """Address of the cluster that is meant: the given one, else `RAY_ADDRESS`, else that of the cluster that this node
    was made part of, with `corral up` or `ray start`. Not one that another run started for itself and will end, which
    is what Ray's own `auto` would take. Its token is used from here on."""
    named = address or os.environ.get("RAY_ADDRESS") or None
    # For Ray's own tools that variable may also be `auto`, or the URL of a dashboard, to which jobs are sent.
    if named == "auto" or (not address and named is not None and named.startswith(("http://", "https://"))):
        named = None
    member = find_membership(named)
    use_token_of(member)
    if named is None and member is not None:
        return member.address
    return named or address_of_ray_start()


def address_of_ray_start() -> str | None:
    """Address that the last `ray start` on this node has left for others, if this user or root has written it: anybody
    may write to the folder, and to join a cluster is to run what it says."""
    try:
        descriptor = os.open(get_ray_address_file(None), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    with os.fdopen(descriptor) as file:
        owner = os.fstat(descriptor).st_uid
        if owner in (0, os.getuid()):
            return file.read().strip() or None
    logger.warning("the Ray cluster of user %d on this machine is not used; `cluster.address` names one", owner)
    return None


def join(address: str) -> None:
    with quietly(), loopback() if address.startswith("127.") else nullcontext():
        try:
            ray.init(address=address, **QUIET)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"the Ray cluster at {address} cannot be used from here: {first_line(error)}") from error


@contextmanager
def quietly() -> Iterator[None]:
    """Ray sends no usage statistics, does not print deaths of workers, which are reported better here, and leaves
    signal handlers as they are."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray._private.worker._worker_logs_enabled = False
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def start_here(cluster: Cluster) -> None:
    """Starts Ray on loopback, with a token that only this process and its children know: nobody else may reach it."""
    import torch

    if "RAY_AUTH_MODE" not in os.environ:
        os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
        reload_token()
    gpus, folder = torch.cuda.device_count(), make_ray_folder()
    if gpus and cluster.is_here:
        os.environ[SHARED_GPUS], gpus = str(gpus), cluster.devices_per_node
    devices: dict[str, Any] = {"num_gpus": gpus}
    devices |= {"resources": None if gpus else {WORKER_SLOT: cluster.devices_per_node}}
    with loopback(), without_monitors():
        try:
            ray.init(
                address="local",
                **devices,
                include_dashboard=False,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(folder),
                _system_config=dict(RAY_SETTINGS),  # Ray writes its folder into it
                **QUIET,
            )
            if cluster.is_here:
                start_more_nodes(cluster.nodes - 1, devices)
        except BaseException as error:  # Ray has no class of its own for this; or Ctrl-C
            end_more_nodes()
            shutil.rmtree(folder, ignore_errors=True)
            if not isinstance(error, Exception):
                raise
            raise RunError(f"Ray could not be started on this machine: {first_line(error)}") from error


def start_more_nodes(number: int, devices: dict[str, Any]) -> None:
    """Starts nodes beside the first one, on loopback addresses of their own. They end with this process."""
    from ray._private.node import Node

    first = ray._private.worker._global_node
    for address in (f"127.0.0.{2 + place}" for place in range(number)):
        parameters = ray._private.parameter.RayParams(
            gcs_address=first.gcs_address,
            node_ip_address=address,
            object_store_memory=STORE_BYTES,
            num_cpus=1,
            include_dashboard=False,
            **devices,
        )
        MORE_NODES.append(Node(parameters, head=False, shutdown_at_exit=False, spawn_reaper=False))


def end_more_nodes() -> None:
    os.environ.pop(SHARED_GPUS, None)  # the next run of this process may have nodes of its own
    while MORE_NODES:
        MORE_NODES.pop().kill_all_processes(check_alive=False, allow_graceful=True)


@contextmanager
def without_monitors() -> Iterator[None]:
    """Makes Ray start neither its autoscaler nor the process that passes on what workers print. A run's own Ray has no
    use for them, and each is a Python process. `ray start` has options for it, `ray.init` has none."""
    parameter, usual = ray._private.parameter, ray._private.parameter.RayParams
    parameter.RayParams = partial(usual, no_monitor=True, include_log_monitor=False)
    try:
        yield
    finally:
        parameter.RayParams = usual


def make_ray_folder() -> Path:
    """Makes the folder of a Ray that this process starts, and removes those of processes that were killed. The lock on
    a folder ends with the process that made it, in whichever container that was."""
    with open_folder(state_folder()) as all_folders:
        # One process at a time: a folder that another one has made and not yet locked looks like one of a killed one.
        fcntl.flock(all_folders, fcntl.LOCK_EX)
        for old in state_folder().glob("run-*"):
            with suppress(FileNotFoundError), open_folder(old) as descriptor:  # it may have ended just now
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                shutil.rmtree(old, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=state_folder()))
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)  # never closed
    return folder


@contextmanager
def open_folder(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def disconnect() -> None:
    """Leaves the cluster, or ends the one that this process has started, of which nothing stays."""
    node = ray._private.worker._global_node
    folder = Path(node.get_temp_dir_path()) if node.head else None
    end_more_nodes()
    ray.shutdown()
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def loopback() -> Iterator[None]:
    """Makes processes that Ray starts listen on loopback. This process has read its environment before, so its constant
    is set too."""
    before = {name: os.environ.get(name) for name in (*CLOSED, *ON_LOOPBACK)}
    os.environ.update({**CLOSED, **ON_LOOPBACK})
    constants, usual = ray._private.ray_constants, ray._private.ray_constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = usual
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
