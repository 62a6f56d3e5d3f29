"""Starting Ray on this node, with everything set that Corral relies on, and stopping it again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from corral.cluster.addresses import interface_variables, is_loopback
from corral.cluster.gcs import MARK_LABEL
from corral.cluster.headfile import token_beside
from corral.cluster.ports import free_port
from corral.recipe.errors import RunError, UserError, first_line
from corral.runtime import token
from corral.runtime.connection import CLOSED, HEALTH_CHECKS, ON_LOOPBACK
from corral.runtime.membership import MARK_VARIABLE, Membership, marked_processes, member_folder
from corral.runtime.nodes import RANK_LABEL, WORKER_SLOT

RAY = (sys.executable, "-m", "ray.scripts.scripts")
START_S = 180.0
CLIENT_PORT, AGENT_PORT = 10001, 52365
"""Ray's own choice; a second cluster on the node gets the next ones."""
END_S = 5.0
"""For processes to end by themselves, before they are killed."""
LAST = "gcs_server"


def start_ray(member: Membership, *, dashboard: tuple[str, int], debugger: str | None, options: Sequence[str]) -> None:
    """Returns when it runs. What it says is in `up.log` beside the record."""
    member.write()
    log = member_folder(member.port) / "up.log"
    with log.open("wb") as file:
        try:
            result = subprocess.run(
                [*RAY, "start", *arguments(member, dashboard, debugger), *options],
                env=environment(member, debugger),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=START_S,
            )
            failed = "" if result.returncode == 0 else last_words(log)
        except subprocess.TimeoutExpired:
            failed = f"nothing within {START_S:g} s"
    if failed:
        stop_ray(member)
        raise RunError(f"Ray did not start on {member.node_address}: {failed} (all of it: {log})")


def arguments(member: Membership, dashboard: tuple[str, int], debugger: str | None) -> list[str]:
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


def environment(member: Membership, debugger: str | None) -> dict[str, str]:
    """Of Ray and of all that it starts on this node."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", *token.VARIABLES)}
    bins = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
    found = {
        **kept,
        **token.variables(None if member.token_file is None else Path(member.token_file)),
        **interface_variables(member.node_address),
        **{f"RAY_{name}": str(value) for name, value in HEALTH_CHECKS.items()},
        MARK_VARIABLE: member.mark,
        "PATH": bins,  # jobs are to find this Python
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    if member.token_file is not None:
        found |= CLOSED
    if is_loopback(member.node_address):
        found |= ON_LOOPBACK
    if debugger is not None:
        found["RAY_DEBUG"] = debugger
    return found


def num_gpus() -> int:
    """That Ray finds here and may use."""
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager = get_accelerator_manager_for_resource("GPU")
    if manager is None:
        return 0
    try:
        visible = manager.get_current_process_visible_accelerator_ids()
        return int(manager.get_current_node_num_accelerators()) if visible is None else len(visible)
    except (RuntimeError, ValueError) as error:  # such as AMD's variables, of which Ray wants one and not the other
        raise UserError(f"Ray cannot tell which GPUs it may use: {first_line(error)}") from error


def check_ray() -> None:
    """That it is there, with what is needed of it."""
    try:
        import ray
        import ray.dashboard.dashboard  # noqa: F401
    except ImportError as error:
        raise UserError("`corral up` needs Ray with its dashboard: pip install 'corral[cluster]'") from error


def has_tokens() -> bool:
    """Ray has them since 2.52."""
    import importlib.util

    return importlib.util.find_spec("ray._private.authentication") is not None


def stop_ray(member: Membership) -> int:
    """Ends all processes that were started with it, and theirs. Returns how many there were."""
    found = processes_of(member)
    send(signal.SIGTERM, member, LAST)  # the others say goodbye to it, and wait for its answer
    send(signal.SIGTERM, member)
    send(signal.SIGKILL, member)
    if member.is_head and member.head_file is not None:
        for left in (Path(member.head_file), token_beside(Path(member.head_file))):
            left.unlink(missing_ok=True)
    member.forget()
    return len(found)


def send(number: signal.Signals, member: Membership, spared: str = "") -> None:
    """To all but the spared, and waits until they have ended, though not for ever."""
    for pid in processes_of(member, spared):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    deadline = time.monotonic() + END_S
    while processes_of(member, spared) and time.monotonic() < deadline:
        time.sleep(0.1)


def processes_of(member: Membership, spared: str = "") -> list[int]:
    return [pid for pid, name in marked_processes(member.mark) if pid != os.getpid() and name != spared]


def last_words(log: Path) -> str:
    """The line that says why: Ray's last one, without its own time stamps."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error" in line]
    return (errors or lines or ["it said nothing"])[-1]
