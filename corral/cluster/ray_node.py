"""Starting Ray on this node, with everything set that Corral relies on, and stopping it again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from corral.cluster.addresses import interface_variables
from corral.cluster.gcs import MARK_LABEL, token_beside
from corral.cluster.node_processes import free_port
from corral.recipe.errors import RunError, UserError, first_line
from corral.runtime.connection import CLOSED, HEALTH_CHECKS, ON_LOOPBACK
from corral.runtime.membership import MARK_VARIABLE, Membership, marked_processes, member_folder
from corral.runtime.network import is_loopback
from corral.runtime.nodes import RANK_LABEL, WORKER_SLOT
from corral.runtime.token import VARIABLES, token_variables

RAY = (sys.executable, "-m", "ray.scripts.scripts")
START_S = 180.0
CLIENT_PORT, AGENT_PORT = 10001, 52365  # Ray's own defaults; a second cluster on the node gets the next ones
STOP_S = 5.0  # for processes to end after SIGTERM, before they are killed


def start_ray(member: Membership, *, dashboard: tuple[str, int], debugger: str | None, options: Sequence[str]) -> None:
    """Returns when Ray runs. Its output is in `up.log` beside the record of the membership."""
    member.write()
    log = member_folder(member.port) / "up.log"
    with log.open("wb") as file:
        try:
            result = subprocess.run(
                [*RAY, "start", *start_options(member, dashboard, debugger), *options],
                env=ray_environment(member, debugger),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=START_S,
            )
            failed = "" if result.returncode == 0 else find_reason(log.read_text(errors="replace"))
        except subprocess.TimeoutExpired:
            failed = f"nothing within {START_S:g} s"
    if failed:
        stop_ray(member)
        raise RunError(f"Ray did not start on {member.node_address}: {failed} (all of it: {log})")


def find_reason(log: str) -> str:
    """The last line that speaks of an error; without one, the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error" in line]
    return (errors or lines or ["it printed nothing"])[-1]


def start_options(member: Membership, dashboard: tuple[str, int], debugger: str | None) -> list[str]:
    """Options of `ray start`."""
    labels = {MARK_LABEL: member.mark} | ({} if member.rank is None else {RANK_LABEL: str(member.rank)})
    found = [
        f"--node-ip-address={member.node_address}",
        f"--temp-dir={member.temp_dir}",
        f"--labels={','.join(f'{name}={value}' for name, value in labels.items())}",
        "--disable-usage-stats",
        f"--dashboard-agent-listen-port={free_port(member.node_address, AGENT_PORT)}",
    ]
    if num_gpus():
        found.append(f"--num-gpus={member.devices}")
    else:
        found.append(f"--resources={json.dumps({WORKER_SLOT: member.devices})}")
    if member.is_head:
        host, port = dashboard
        found += ["--head", f"--port={member.port}", f"--dashboard-host={host}", f"--dashboard-port={port}"]
        found.append(f"--ray-client-server-port={free_port(member.node_address, CLIENT_PORT)}")
    else:
        found.append(f"--address={member.address}")
    if debugger is not None and member.token_file is None:
        found.append("--ray-debugger-external")
    return found


def ray_environment(member: Membership, debugger: str | None) -> dict[str, str]:
    """Environment of Ray and of all that it starts on this node."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", *VARIABLES)}
    return {
        **kept,
        **token_variables(None if member.token_file is None else Path(member.token_file)),
        **interface_variables(member.node_address),
        **{f"RAY_{name}": str(value) for name, value in HEALTH_CHECKS.items()},
        MARK_VARIABLE: member.mark,
        # Jobs are to find this Python.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        **({} if member.token_file is None else CLOSED),
        **(ON_LOOPBACK if is_loopback(member.node_address) else {}),
        **({} if debugger is None else {"RAY_DEBUG": debugger}),
    }


def num_gpus() -> int:
    """Number of GPUs that Ray finds on this node and may use."""
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager = get_accelerator_manager_for_resource("GPU")
    if manager is None:
        return 0
    try:
        visible = manager.get_current_process_visible_accelerator_ids()
        return int(manager.get_current_node_num_accelerators()) if visible is None else len(visible)
    except (RuntimeError, ValueError) as error:  # such as AMD's variables, of which Ray wants one and not the other
        raise UserError(f"Ray cannot tell which GPUs it may use: {first_line(error)}") from error


def check_ray(is_insecure: bool) -> None:
    """Raises unless Ray is installed with its dashboard and, for a cluster with a token, knows tokens (since 2.52)."""
    try:
        import ray
        import ray.dashboard.dashboard  # noqa: F401
    except ImportError as error:
        raise UserError("`corral up` needs Ray with its dashboard: pip install 'corral[cluster]'") from error
    if not is_insecure and find_spec("ray._private.authentication") is None:
        raise UserError(
            "this Ray has no token authentication, so everyone who reaches this node could run commands on it; install "
            "ray 2.52 or newer, or accept that with --insecure"
        )


def stop_ray(member: Membership) -> int:
    """Ends all processes that were started with the membership, and theirs. Returns how many there were."""

    def running(spared: str = "") -> list[int]:
        return [pid for pid, name in marked_processes(member.mark) if pid != os.getpid() and name != spared]

    num_processes = len(running())
    # The head's server last: the other processes deregister from it, and wait for its answer.
    for number, spared in ((signal.SIGTERM, "gcs_server"), (signal.SIGTERM, ""), (signal.SIGKILL, "")):
        for pid in running(spared):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + STOP_S
        while running(spared) and time.monotonic() < deadline:
            time.sleep(0.1)
    if member.is_head and member.head_file is not None:
        for left in (Path(member.head_file), token_beside(Path(member.head_file))):
            left.unlink(missing_ok=True)
    member.forget()
    return num_processes
