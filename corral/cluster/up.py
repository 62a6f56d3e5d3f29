"""`corral up`: this node becomes the head of a new cluster, or part of one. The same command on every node, in any
order.

A worker waits for the head to be there, and every node for all others, with a deadline, saying which are missing.
Before anything is started it is checked whether it can work: ports, another Ray, the token, versions.
"""

import os
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from corral.cluster import token as tokens
from corral.cluster.addresses import head_address, resolve, worker_address
from corral.cluster.gcs import Gcs, NoAnswer, NodeEntry, Refused
from corral.cluster.headfile import HeadFile, token_beside
from corral.cluster.identity import Identity
from corral.cluster.ports import free_port, is_free, owner, ray_processes
from corral.cluster.ray_node import check_ray, has_tokens, num_gpus, start_ray, stop_ray
from corral.cluster.report import NodeReport
from corral.observe.status_line import Countdown, StatusLine
from corral.recipe.errors import RunError, UserError
from corral.runtime.membership import Membership, marked_processes, member_folder, own_memberships
from corral.runtime.network import answers
from corral.runtime.token import use_token

HEAD_GONE_S = 15.0
WATCH_S = 1.0
KNOWN_S = 30.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Wish:
    """What was asked for."""

    identity: Identity
    devices: int | None = None
    """None: all GPUs; one worker slot where there are none."""
    head_file: Path | None = None
    timeout_s: float = 600.0
    address: str | None = None
    """Of this node, if it is not to be found."""
    token_file: Path | None = None
    is_insecure: bool = False
    dashboard: tuple[str, int] = ("127.0.0.1", 8265)
    debugger: str | None = None
    is_beside: bool = False
    """Another Ray may run on this node."""
    temp_dir: Path | None = None
    ray_options: tuple[str, ...] = field(default=())


def up(wish: Wish, line: StatusLine) -> Membership:
    """Returns when this node is part of the cluster; `wait_for_all` waits for the others."""
    check_ray()
    if not wish.is_insecure and not has_tokens():
        raise UserError(
            "this Ray has no token authentication, so everyone who reaches this node could run commands on it; install "
            "ray 2.52 or newer, or accept that with --insecure"
        )
    if (member := already_up(wish)) is not None:
        return member
    countdown = Countdown(wish.timeout_s, line)
    member = start_head(wish) if wish.identity.is_head else join_head(wish, countdown)
    line.clear()
    return member


def already_up(wish: Wish) -> Membership | None:
    """This command was run here before, which is fine. Anything else that runs here is in the way."""
    identity = wish.identity
    for member in own_memberships():
        same = member.rank == identity.rank and member.num_nodes == identity.num_nodes
        if same and is_meant(member, wish) and identity.id in (None, member.id):
            use_token(None if member.token_file is None else Path(member.token_file))
            if is_known(member):
                return member
            stop_ray(member)  # what is left of a cluster whose head has gone, or was started again
    own = own_memberships()
    if own and (not wish.is_beside or any(member.port == identity.port for member in own)):
        rank = "part" if own[0].rank is None else f"rank {own[0].rank}"
        raise UserError(
            f"this node is {rank} of the cluster at {own[0].address} already; end it with `corral down`, or start "
            "another beside it with --beside and another --port"
        )
    marked = {pid for member in own for pid, _ in marked_processes(member.mark)}
    others = [process for process in ray_processes() if process.pid not in marked]
    if others and not wish.is_beside:
        raise UserError(
            f"another Ray runs on this node: {', '.join(map(str, others))}; end it, or start beside it with --beside "
            "and another --port"
        )
    return None


def is_meant(member: Membership, wish: Wish) -> bool:
    """Whether it is the cluster whose head was named, by address or by a file."""
    host, _, port = member.address.rpartition(":")
    if wish.head_file is not None and not wish.identity.is_head:
        return member.head_file == str(wish.head_file.resolve())
    named = wish.identity.head
    return port == str(wish.identity.port) and (named is None or member.is_head or host in resolve(named))


def is_known(member: Membership) -> bool:
    """Whether the head that answers has this node."""
    try:
        return any(node.mark == member.mark and node.is_alive for node in Gcs(member.address).nodes())
    except (NoAnswer, Refused):
        return False


# --- the head


def start_head(wish: Wish) -> Membership:
    identity = wish.identity
    is_alone = identity.num_nodes in (None, 1) and identity.head is None and wish.head_file is None
    address = head_address(identity.head, wish.address, is_alone, os.environ.get("SLURMD_NODENAME"))
    if not is_free(address, identity.port):
        by = owner(identity.port)
        raise UserError(
            f"port {identity.port} of this node is in use{f' by {by}' if by else ''}; choose another with --port (or "
            "MASTER_PORT), the same on all nodes"
        )
    host, port = wish.dashboard
    dashboard = (host, free_port(host, port))
    token = None
    if not wish.is_insecure:
        token = tokens.known_token(wish.token_file, None, os.environ) or tokens.make_token()
    use_token(keep_token(identity.port, token))
    if wish.head_file is not None:
        wish.head_file.unlink(missing_ok=True)  # of an earlier cluster
        if token is not None:
            tokens.write(token_beside(wish.head_file), token)
    shown = address if host == "0.0.0.0" else host
    member = membership(wish, f"{address}:{identity.port}", address, f"http://{shown}:{dashboard[1]}")
    with started(member, wish, dashboard):
        gcs = Gcs(member.address)
        introduce(gcs, member)
        gcs.put("cluster", cluster_of(member))
        if wish.head_file is not None:
            HeadFile(member.id, gcs.cluster_id, member.address, time.time(), socket.gethostname()).write(wish.head_file)
    return member


def cluster_of(member: Membership) -> dict[str, Any]:
    """What the others must know of it."""
    return {
        "id": member.id,
        "num_nodes": member.num_nodes,
        "dashboard": member.dashboard,
        "has_token": member.token_file is not None,
    }


# --- the others


def join_head(wish: Wish, countdown: Countdown) -> Membership:
    address = find_head(wish, countdown)
    gcs = Gcs(address)
    known = await_introduction(gcs, countdown)
    if not wish.is_insecure and known.get("has_token") is False:
        raise UserError(f"the head at {address} was started with --insecure, and so must this node be")
    others = [node for node in gcs.nodes() if node.is_alive]
    check_versions(gcs, others)
    own_address = worker_address(address.rpartition(":")[0], wish.address)
    for node in others:
        if wish.identity.rank is not None and node.rank == wish.identity.rank:
            raise UserError(
                f"rank {node.rank} of the cluster at {address} is taken by {node.hostname} ({node.address})"
            )
        if node.address == own_address and not wish.is_beside:
            raise UserError(f"{own_address} is part of the cluster at {address} already, as {node.hostname}")
    member = membership(wish, address, own_address, known.get("dashboard"), known.get("id"))
    with started(member, wish, wish.dashboard):
        introduce(gcs, member)
    return member


def find_head(wish: Wish, countdown: Countdown) -> str:
    """Its address, once it answers there. Its token is used from here on."""
    identity, environment = wish.identity, dict(os.environ)  # which changes when a token is used
    beside = None if wish.head_file is None else token_beside(wish.head_file)
    if identity.head is None and wish.head_file is None:
        raise UserError(
            "where is the head? Set MASTER_ADDR (and MASTER_PORT), or use --join ADDRESS, or --head-file PATH on a "
            "file system that all nodes share"
        )
    while True:
        token = None if wish.is_insecure else tokens.known_token(wish.token_file, beside, environment)
        address, missing = look_for_head(wish, token)
        if address is not None and token is None and not wish.is_insecure:
            raise UserError(
                f"the head at {address} needs a token and this node has none: copy the head's ~/.corral/token here, or "
                "set RAY_AUTH_TOKEN (or --insecure, if the head was started so)"
            )
        if address is not None:
            return address
        if countdown.is_over:
            raise RunError(f"the head was not there within {countdown.timeout_s:g} s: {missing}")
        countdown.more(f"the head: {missing}")


def look_for_head(wish: Wish, token: str | None) -> tuple[str | None, str]:
    """Its address, or what is missing. The token is used from here on."""
    identity = wish.identity
    if wish.head_file is not None:
        found = HeadFile.read(wish.head_file)
        if found is None:
            return None, f"{wish.head_file} is not there yet"
        use_token(keep_token(port_of(found.address), token))
        refusal = found.refusal(identity.id)
        return (found.address, "") if refusal is None else (None, f"{wish.head_file}: {refusal}")
    assert identity.head is not None
    addresses = resolve(identity.head)
    if not addresses:
        return None, f"the name {identity.head} is unknown on this node"
    address = f"{addresses[0]}:{identity.port}"
    use_token(keep_token(identity.port, token))
    return (address, "") if answers(address) else (None, f"nothing answers at {address} ({identity.head})")


def await_introduction(gcs: Gcs, countdown: Countdown) -> dict[str, Any]:
    """What the head says of the cluster, a moment after it first answers; nothing if it was not started by Corral."""
    while True:
        head = next((node for node in gcs.nodes() if node.is_head and node.is_alive), None)
        known = gcs.get("cluster")
        if known is not None or (head is not None and not head.mark):
            return dict(known or {})
        if countdown.is_over:
            raise RunError(f"the head at {gcs.address} answers, but has not started within {countdown.timeout_s:g} s")
        countdown.more(f"the head at {gcs.address} to start")


def check_versions(gcs: Gcs, others: list[NodeEntry]) -> None:
    head = next((node for node in others if node.is_head), None)
    report = None if head is None else NodeReport.read(gcs.get(f"node/{head.id}"))
    if head is not None and report is not None and (found := NodeReport.own().differences(report)):
        raise UserError(f"this node does not fit the head, {head.hostname} ({head.address}): {'; '.join(found)}")


# --- both


def membership(wish: Wish, address: str, own_address: str, dashboard: str | None, id: str | None = None) -> Membership:
    identity = wish.identity
    return Membership(
        id=identity.id or id or secrets.token_hex(4),
        mark=secrets.token_hex(8),
        rank=identity.rank,
        num_nodes=identity.num_nodes,
        address=address,
        node_address=own_address,
        is_head=identity.is_head,
        dashboard=dashboard,
        token_file=None if wish.is_insecure else str(node_token(port_of(address))),
        devices=wish.devices if wish.devices is not None else num_gpus() or 1,
        temp_dir=str(wish.temp_dir or member_folder(port_of(address))),
        head_file=None if wish.head_file is None else str(wish.head_file.resolve()),
        started=time.time(),
    )


@contextmanager
def started(member: Membership, wish: Wish, dashboard: tuple[str, int]) -> Iterator[None]:
    """Ray, which is ended again if the node cannot introduce itself: nobody would know it."""
    try:
        start_ray(member, dashboard=dashboard, debugger=wish.debugger, options=wish.ray_options)
        yield
    except BaseException:
        stop_ray(member)
        raise


def keep_token(port: int, token: str | None) -> Path | None:
    """This node's copy."""
    member_folder(port).mkdir(exist_ok=True)
    if token is None:
        return None
    tokens.write(node_token(port), token)
    return node_token(port)


def node_token(port: int) -> Path:
    return member_folder(port) / "token"


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def introduce(gcs: Gcs, member: Membership) -> None:
    """Says to the others what this node is. A head that has much to do knows of it a moment later."""
    deadline = time.monotonic() + KNOWN_S
    while (own := next((node for node in gcs.nodes() if node.mark == member.mark), None)) is None:
        if time.monotonic() > deadline:
            raise RunError(f"Ray was started on {member.node_address}, but {member.address} does not know of it")
        time.sleep(WATCH_S)
    gcs.put(f"node/{own.id}", NodeReport.own().as_dict())


def wait_for_all(member: Membership, num_nodes: int, countdown: Countdown) -> None:
    """Until every rank has joined."""
    gcs = Gcs(member.address)
    while True:
        try:
            nodes = [node for node in gcs.nodes() if node.is_alive]
        except NoAnswer as error:
            raise RunError(f"the head, {member.address}, is gone; this node waited for the others") from error
        present = {node.rank: node for node in nodes if node.rank is not None}
        missing = [rank for rank in range(num_nodes) if rank not in present]
        if not missing:
            countdown.line.clear()
            return
        here = ", ".join(f"{rank} {node.hostname}" for rank, node in sorted(present.items()))
        lack = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {num_nodes}; here: {here}"
        if countdown.is_over:
            raise RunError(
                f"after {countdown.timeout_s:g} s the cluster lacks {lack}. Run `corral up` with RANK={missing[0]} on "
                "that node, or see what it says there; this node stays up until `corral down`"
            )
        countdown.more(lack)


class Foreground:
    """`--block`: the node's part lasts as long as this command. A signal ends it, at any time."""

    def __init__(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._end)

    def _end(self, number: int, _: FrameType | None) -> None:
        for other in SIGNALS:  # no second one disturbs what is done now
            signal.signal(other, signal.SIG_IGN)
        raise Ended

    def stay(self, member: Membership) -> None:
        """Until a signal comes. Raises if Ray ends by itself, or its head."""
        answered = time.monotonic()
        while True:
            if not member.is_alive:
                raise RunError(f"Ray has ended on this node, {member.node_address}; its logs are in {member.temp_dir}")
            if answers(member.address):
                answered = time.monotonic()
            elif time.monotonic() - answered > HEAD_GONE_S:
                raise RunError(
                    f"the head, {member.address}, has not answered for {HEAD_GONE_S:g} s; this node ends too"
                )
            time.sleep(WATCH_S)


class Ended(BaseException):
    """By a signal. Not an error."""
