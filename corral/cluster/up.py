"""`corral up` and `corral down`: this node becomes the head of a new cluster or joins one, and leaves it again.

The same command runs on every node, in any order. A worker waits for the head, and every node for all others, with a
deadline, and the status line says which are missing. Ports, another Ray, the token and versions are checked before
anything is started.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from corral.cluster.gcs import MARK_LABEL, Gcs, HeadFile, NoAnswer, NodeEntry, TokenRefused, token_beside
from corral.cluster.gcs_keeper import remove_storage, start_keeper, storage_variables
from corral.cluster.identity import (
    NodeIdentity,
    head_address,
    interface_variables,
    is_known,
    resolve,
    worker_address,
)
from corral.cluster.node_processes import free_port, is_connected_to, is_free, port_owner, ray_servers
from corral.cluster.node_report import NodeReport
from corral.observe.status_line import Countdown, StatusLine
from corral.recipe.errors import RunError, UserError, first_line, install_command
from corral.runtime.connection import CLOSED, ON_LOOPBACK, RAY_SETTINGS
from corral.runtime.membership import (
    MARK_VARIABLE,
    RECORD,
    Membership,
    marked_processes,
    member_folder,
    own_memberships,
    private_folder,
    state_folder,
)
from corral.runtime.network import answers, is_loopback, split_address
from corral.runtime.nodes import RANK_LABEL, WORKER_SLOT
from corral.runtime.presence import present
from corral.runtime.token import (
    VARIABLES,
    find_token,
    make_token,
    reload_token,
    token_variables,
    use_token,
    write_token,
)

HEAD_GONE_S = 15.0
POLL_S = 1.0
REGISTER_S = 30.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WITHOUT_SERVE = "import sys; sys.modules['ray.serve'] = None; from ray.scripts.scripts import main; main()"
RAY = (sys.executable, "-c", WITHOUT_SERVE)
"""`ray` but for `ray serve`, whose imports (fastapi, pandas) are half of the CPU time of `ray start`."""
START_S = 180.0
CLIENT_PORTS, AGENT_PORTS = range(10001, 9901, -1), range(52365, 52465)
"""Ray's own defaults first; a second cluster on the node gets the next ones. Above 10001 are the ports of Ray's
workers, and Ray refuses to start with another port among them."""
NUM_DASHBOARD_PORTS = 100
SOCKET_PATH = 107  # bytes that the kernel allows for the path of a socket
LONGEST_SOCKET = "/session_2026-11-17_04-07-19_123456_1234567/sockets/dash_TaskEventsHead"
STOP_S = 5.0  # for processes to end after SIGTERM, before they are killed


@dataclass(frozen=True)
class UpOptions:
    identity: NodeIdentity
    devices: int | None = None  # None: all GPUs; one worker slot where there are none
    head_file: Path | None = None
    timeout_s: float = 600.0
    address: str | None = None  # of this node; None: it is found
    token_file: Path | None = None
    is_insecure: bool = False
    dashboard: tuple[str, int] = ("127.0.0.1", 8265)
    debugger: str | None = None
    is_beside: bool = False  # another Ray may run on this node
    temp_dir: Path | None = None
    gcs_storage: bool = False  # the head's GCS has its tables on disk, and is started again when it dies
    ray_options: tuple[str, ...] = ()


def up(options: UpOptions, line: StatusLine) -> Membership:
    """Returns when this node is part of the cluster; `wait_for_all` waits for the other nodes."""
    check_ray(options.is_insecure, options.gcs_storage)
    if (member := already_up(options)) is not None:
        return member
    if options.identity.is_head:
        return start_head(options, Countdown(options.timeout_s, line))
    member = join_head(options, Countdown(options.timeout_s, line))
    line.clear()
    return member


def already_up(options: UpOptions) -> Membership | None:
    """The membership that the same command made here before. Raises if anything else runs here that is in the way."""
    identity = options.identity
    for member in own_memberships():
        same = member.rank == identity.rank and member.num_nodes == identity.num_nodes
        if same and is_meant(member, options) and identity.id in (None, member.id):
            given = {name: os.environ[name] for name in VARIABLES if name in os.environ}
            use_token(None if member.token_file is None else Path(member.token_file))
            if is_registered(member):
                return member
            stop_ray(member)  # what is left of a cluster whose head is gone, or was started again
            for name in VARIABLES:  # the new one may have another token
                os.environ.pop(name, None)
            os.environ.update(given)
            reload_token()
    own = own_memberships()
    if own and not options.is_beside:
        raise already_part_of(own[0])
    check_record(identity.port)
    marked = {pid for member in own for pid, _ in marked_processes(member.mark)}
    others = [process for process in ray_servers() if process.pid not in marked]
    if others and not options.is_beside:
        raise UserError(
            f"another Ray runs on this node: {', '.join(map(str, others))}; end it, or start beside it with --beside "
            "and another --port"
        )
    return None


def already_part_of(member: Membership) -> UserError:
    rank = "part" if member.rank is None else f"rank {member.rank}"
    return UserError(
        f"this node is {rank} of the cluster at {member.address} already; end it with `corral down`, or start "
        "another beside it with --beside and another --port"
    )


def check_record(port: int) -> None:
    """Raises if this node is in a cluster with that port, whose record and token another one's would replace."""
    for member in own_memberships():
        if member.port == port:
            raise already_part_of(member)


def is_meant(member: Membership, options: UpOptions) -> bool:
    """Whether the membership is in the cluster whose head was named, by address or by a file."""
    host, port = split_address(member.address)
    if options.head_file is not None and not options.identity.is_head:
        return member.head_file == str(options.head_file.resolve())
    head = options.identity.head
    return port == options.identity.port and (head is None or member.is_head or host in resolve(head))


def is_registered(member: Membership) -> bool:
    """Whether a head answers and has this node."""
    try:
        return any(node.mark == member.mark and node.is_alive for node in Gcs(member.address).nodes())
    except (NoAnswer, TokenRefused):
        return False


def start_head(options: UpOptions, countdown: Countdown) -> Membership:
    identity, own_name = options.identity, os.environ.get("SLURMD_NODENAME")
    is_alone = identity.num_nodes in (None, 1) and identity.head is None and options.head_file is None
    while not (countdown.is_over or is_known(identity.head, options.address, own_name)):
        countdown.more(f"the name {identity.head}, which is to be this node's, to be known here")
    countdown.line.clear()
    address = head_address(identity.head, options.address, is_alone, own_name)
    if not is_free(address, identity.port):
        by = port_owner(identity.port)
        raise UserError(
            f"port {identity.port} of this node is in use{f' by {by}' if by else ''}; choose another with --port (or "
            "MASTER_PORT), the same on all nodes"
        )
    host, port = options.dashboard
    dashboard = (host, free_port(host, range(port, port + NUM_DASHBOARD_PORTS)))
    token = None if options.is_insecure else find_token(options.token_file, None, os.environ) or make_token()
    use_token(keep_token(identity.port, token))
    if options.head_file is not None:
        options.head_file.unlink(missing_ok=True)  # of an earlier cluster
        if token is not None:
            write_token(token_beside(options.head_file), token)
    url = f"http://{address if host == '0.0.0.0' else host}:{dashboard[1]}"
    member = new_membership(options, f"{address}:{identity.port}", address, url)
    with started(member, options, dashboard):
        gcs = Gcs(member.address)
        store_report(gcs, member)
        about = {"id": member.id, "num_nodes": member.num_nodes, "dashboard": member.dashboard}
        gcs.put("cluster", {**about, "has_token": member.token_file is not None})
        if options.head_file is not None:
            file = HeadFile(member.id, gcs.cluster_id, member.address, time.time(), socket.gethostname())
            file.write(options.head_file)
    return member


def join_head(options: UpOptions, countdown: Countdown) -> Membership:
    address = wait_for_head(options, countdown)
    gcs = Gcs(address)
    cluster = wait_for_cluster_entry(gcs, countdown)
    if not options.is_insecure and cluster.get("has_token") is False:
        raise UserError(f"the head at {address} was started with --insecure, and so must this node be")
    others = [node for node in gcs.nodes() if node.is_alive]
    check_versions(gcs, others)
    own_address = worker_address(split_address(address)[0], options.address)
    for node in others:
        if options.identity.rank is not None and node.rank == options.identity.rank:
            raise UserError(
                f"rank {node.rank} of the cluster at {address} is taken by {node.hostname} ({node.address})"
            )
        if node.address == own_address and not options.is_beside:
            raise UserError(f"{own_address} is part of the cluster at {address} already, as {node.hostname}")
    member = new_membership(options, address, own_address, cluster.get("dashboard"), cluster.get("id"))
    with started(member, options, options.dashboard):
        store_report(gcs, member)
    return member


def wait_for_head(options: UpOptions, countdown: Countdown) -> str:
    """Address of the head, once it answers there. Its token is used from here on."""
    environment = dict(os.environ)  # a copy: using a token changes it
    beside = None if options.head_file is None else token_beside(options.head_file)
    if options.identity.head is None and options.head_file is None:
        raise UserError(
            "where is the head? Set MASTER_ADDR (and MASTER_PORT), or use --join ADDRESS, or --head-file PATH on a "
            "file system that all nodes share"
        )
    while True:
        token = None if options.is_insecure else find_token(options.token_file, beside, environment)
        try:
            address = look_for_head(options, token)
        except NoAnswer as missing:
            if countdown.is_over:
                raise RunError(f"the head was not there within {countdown.timeout_s:g} s: {missing}") from None
            countdown.more(f"the head: {missing}")
            continue
        if token is None and not options.is_insecure:
            raise UserError(
                f"the head at {address} needs a token and this node has none: copy the head's ~/.corral/token here, or "
                "set RAY_AUTH_TOKEN (or --insecure, if the head was started so)"
            )
        return address


def look_for_head(options: UpOptions, token: str | None) -> str:
    """Address of the head. The token is used from here on."""
    identity = options.identity
    if options.head_file is not None:
        found = HeadFile.read(options.head_file)
        check_record(split_address(found.address)[1])
        use_token(keep_token(split_address(found.address)[1], token))
        found.check(options.head_file, identity.id)
        return found.address
    assert identity.head is not None
    addresses = resolve(identity.head)
    if not addresses:
        raise NoAnswer(f"the name {identity.head} is unknown on this node")
    address = f"{addresses[0]}:{identity.port}"
    use_token(keep_token(identity.port, token))
    if not answers(address):
        raise NoAnswer(f"nothing answers at {address} ({identity.head})")
    return address


def wait_for_cluster_entry(gcs: Gcs, countdown: Countdown) -> dict[str, Any]:
    """What the head has stored about the cluster, a moment after it first answers; empty if Corral did not start it."""
    while True:
        head = next((node for node in gcs.nodes() if node.is_head and node.is_alive), None)
        entry = gcs.get("cluster")
        if entry is not None or (head is not None and not head.mark):
            return dict(entry or {})
        if countdown.is_over:
            raise RunError(f"the head at {gcs.address} answers, but has not started within {countdown.timeout_s:g} s")
        countdown.more(f"the head at {gcs.address} to start")


def check_versions(gcs: Gcs, others: list[NodeEntry]) -> None:
    head = next((node for node in others if node.is_head), None)
    report = None if head is None else NodeReport.read(gcs.get(f"node/{head.id}"))
    if head is not None and report is not None and (found := NodeReport.own().differences(report)):
        raise UserError(f"this node does not fit the head, {head.hostname} ({head.address}): {'; '.join(found)}")


def new_membership(
    options: UpOptions, address: str, own_address: str, dashboard: str | None, id: str | None = None
) -> Membership:
    identity, folder = options.identity, member_folder(split_address(address)[1])
    return Membership(
        id=identity.id or id or secrets.token_hex(4),
        mark=secrets.token_hex(8),
        rank=identity.rank,
        num_nodes=identity.num_nodes,
        address=address,
        node_address=own_address,
        is_head=identity.is_head,
        dashboard=dashboard,
        token_file=None if options.is_insecure else str(folder / "token"),
        devices=options.devices if options.devices is not None else num_gpus() or 1,
        temp_dir=str(folder if options.temp_dir is None else check_temp_dir(options.temp_dir)),
        head_file=None if options.head_file is None else str(options.head_file.resolve()),
        started=time.time(),
        gcs_storage=identity.is_head and options.gcs_storage,
    )


def check_temp_dir(folder: Path) -> Path:
    """Returns the absolute path of the folder of --temp-dir, which only this user can open and in which there is room
    for the paths of Ray's sockets."""
    folder, room = folder.absolute(), SOCKET_PATH - len(LONGEST_SOCKET)
    if (length := len(os.fsencode(folder))) > room:
        raise UserError(
            f"--temp-dir: Ray's sockets are below it, and the kernel allows {SOCKET_PATH} bytes for their paths: "
            f"{folder} has {length} bytes, and {room} are left for it"
        )
    return private_folder(folder)


@contextmanager
def started(member: Membership, options: UpOptions, dashboard: tuple[str, int]) -> Iterator[None]:
    """Starts Ray, and ends it again if the node cannot store its report: the others would not know of it."""
    try:
        start_ray(member, dashboard=dashboard, debugger=options.debugger, options=options.ray_options)
        yield
    except BaseException:
        stop_ray(member)
        raise


def keep_token(port: int, token: str | None) -> Path | None:
    """Writes this node's copy of the token. Returns its file."""
    folder = member_folder(port)
    folder.mkdir(exist_ok=True)
    if token is None:
        return None
    write_token(folder / "token", token)
    return folder / "token"


def store_report(gcs: Gcs, member: Membership) -> None:
    """Stores this node's report for the others. A busy head knows of the node only a moment after Ray has started."""
    deadline = time.monotonic() + REGISTER_S
    while (own := next((node for node in gcs.nodes() if node.mark == member.mark), None)) is None:
        if time.monotonic() > deadline:
            raise RunError(f"Ray was started on {member.node_address}, but {member.address} does not know of it")
        time.sleep(POLL_S)
    gcs.put(f"node/{own.id}", asdict(NodeReport.own()))


def wait_for_all(member: Membership, num_nodes: int, countdown: Countdown) -> None:
    """Waits until every rank has joined."""
    gcs = Gcs(member.address)
    while True:
        try:
            ranks = {node.rank: node for node in gcs.nodes() if node.is_alive and node.rank is not None}
        except NoAnswer as error:
            raise RunError(f"the head, {member.address}, is gone; this node waited for the others") from error
        missing = [rank for rank in range(num_nodes) if rank not in ranks]
        if not missing:
            countdown.line.clear()
            return
        here = ", ".join(f"{rank} {node.hostname}" for rank, node in sorted(ranks.items()))
        lack = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {num_nodes}; here: {here}"
        if countdown.is_over:
            raise RunError(
                f"after {countdown.timeout_s:g} s the cluster lacks {lack}. Run `corral up` with RANK={missing[0]} on "
                "that node, or see what it says there; this node stays up until `corral down`"
            )
        countdown.more(lack)


class EndedBySignal(BaseException):
    """Ends the command without an error."""


def end_on_signals() -> None:
    """`--block`: this node stays in the cluster as long as the command runs. A signal ends it, at any time."""

    def end(number: int, _: FrameType | None) -> None:
        for other in SIGNALS:  # a second one must not disturb the cleanup
            signal.signal(other, signal.SIG_IGN)
        raise EndedBySignal

    for number in SIGNALS:
        signal.signal(number, end)


def stay(member: Membership) -> None:
    """Blocks until a signal comes. Raises if Ray ends by itself, or its head."""
    answered = time.monotonic()
    while True:
        if not member.is_alive:
            raise RunError(f"Ray has ended on this node, {member.node_address}; its logs are in {member.temp_dir}")
        if answers(member.address):
            answered = time.monotonic()
        elif time.monotonic() - answered > HEAD_GONE_S:
            raise RunError(f"the head, {member.address}, has not answered for {HEAD_GONE_S:g} s; this node ends too")
        time.sleep(POLL_S)


def down(port: int | None, is_forced: bool) -> list[tuple[Membership, int]]:
    """Ends this node's part of one cluster, or of all. Returns the memberships with how many processes were ended."""
    records = [Membership.read(record) for record in sorted(state_folder().glob(f"ray-*/{RECORD}"))]
    found = [member for member in records if member is not None and port in (None, member.port)]
    for member in () if is_forced else found:
        own = {pid for pid, _ in marked_processes(member.mark)}
        # Runs with workers here, or whose controller is here and uses this cluster, whoever started it.
        runs = sorted({one.run for one in present() if one.pid in own or is_connected_to(one.pid, member.port)})
        if runs:
            raise UserError(
                f"{' and '.join(runs)} trains on this node: stop it first, which saves it (`corral stop JOB`, or "
                "Ctrl-C where it runs), or lose what was not saved with --force"
            )
    return [(member, stop_ray(member)) for member in found]


# --- Ray on this node, with everything set that Corral relies on


def start_ray(member: Membership, *, dashboard: tuple[str, int], debugger: str | None, options: Sequence[str]) -> None:
    """Returns when Ray runs. Its output is in `up.log` beside the record of the membership."""
    member.write()
    log, environment = member_folder(member.port) / "up.log", ray_environment(member, debugger)
    with log.open("wb") as file:
        try:
            result = subprocess.run(
                [*RAY, "start", *start_options(member, dashboard, debugger), *options],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=START_S,
            )
            lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
            errors = [line for line in lines if "Error" in line or "error" in line]
            failed = "" if result.returncode == 0 else (errors or lines or ["it printed nothing"])[-1]
        except subprocess.TimeoutExpired:
            failed = f"nothing within {START_S:g} s"
    if failed:
        stop_ray(member)
        raise RunError(f"Ray did not start on {member.node_address}: {failed} (all of it: {log})")
    if member.gcs_storage:
        start_keeper(member, environment)


def start_options(member: Membership, dashboard: tuple[str, int], debugger: str | None) -> list[str]:
    """Options of `ray start`."""
    labels = {MARK_LABEL: member.mark} | ({} if member.rank is None else {RANK_LABEL: str(member.rank)})
    found = [
        f"--node-ip-address={member.node_address}",
        f"--temp-dir={member.temp_dir}",
        f"--labels={','.join(f'{name}={value}' for name, value in labels.items())}",
        "--disable-usage-stats",
        f"--dashboard-agent-listen-port={free_port(member.node_address, AGENT_PORTS)}",
    ]
    if num_gpus():
        found.append(f"--num-gpus={member.devices}")
    else:
        found.append(f"--resources={json.dumps({WORKER_SLOT: member.devices})}")
    if member.is_head:
        host, port = dashboard
        found += ["--head", f"--port={member.port}", f"--dashboard-host={host}", f"--dashboard-port={port}"]
        found.append(f"--ray-client-server-port={free_port(member.node_address, CLIENT_PORTS)}")
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
        **{f"RAY_{name}": str(value) for name, value in RAY_SETTINGS.items()},
        MARK_VARIABLE: member.mark,
        # Jobs are to find this Python.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)]),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        **({} if member.token_file is None else CLOSED),
        **(ON_LOOPBACK if is_loopback(member.node_address) else {}),
        **({} if debugger is None else {"RAY_DEBUG": debugger}),
        **(storage_variables(member) if member.gcs_storage else {}),
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


def check_ray(is_insecure: bool, gcs_storage: bool) -> None:
    """Raises unless Ray is installed with its dashboard and, for a cluster with a token, knows tokens (since 2.52)."""
    try:
        import ray
        import ray.dashboard.dashboard
        from ray._private.node import Node
    except ImportError as error:
        raise UserError(f"`corral up` needs Ray with its dashboard: {install_command('cluster')}") from error
    if not is_insecure and find_spec("ray._private.authentication") is None:
        raise UserError(
            "this Ray has no token authentication, so everyone who reaches this node could run commands on it; install "
            "ray 2.52 or newer, or accept that with --insecure"
        )
    if gcs_storage and not hasattr(Node, "_is_rocksdb_gcs"):
        raise UserError(f"--gcs-storage: Ray {ray.__version__} cannot keep its tables on disk without Redis; 2.60 can")


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
    if member.gcs_storage:
        remove_storage(member)
    member.forget()
    return num_processes
