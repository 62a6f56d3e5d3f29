"""Checks of the network and of Ray: which nodes can connect to which, by which names and interfaces, how far apart
their clocks are, and which Ray processes there are."""

import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from corral.cluster.doctor.findings import Finding, GroupSpeed, NodeRef, format_hosts, format_some, format_speed
from corral.cluster.node_processes import SERVERS, NodeProcess, ProcessTable, raylet_of, socket_inodes, tcp_sockets
from corral.runtime.membership import own_memberships
from corral.runtime.network import INTERFACE_VARIABLES, is_loopback, split_address
from corral.runtime.token import default_token

CONNECT_S = 3.0
MAX_CONNECTIONS = 32
ANSWER_BYTES = 64
COMPARED = ("NCCL_", "GLOO_", "UCX_", "RCCL_", "HSA_", "FI_")
"""Prefixes of variables that change how nodes communicate: a node that alone has them does not match the others."""
FIREWALL = "open the ports between the nodes to each other (all of them: workers use any), on the firewall of {host}"
CLOCK_WARNING_S, CLOCK_ERROR_S = 1.0, 30.0
FAR_SLOWER = 1 / 3  # of the median
SILENT = "no answer"
SET_CLOCK = "let chrony or systemd-timesyncd set the clock there (timedatectl set-ntp true)"
OTHERS_MODE = 0o077
MAX_PROCESSES = 6
MAX_PORTS = 3


class Listener:
    """Answers every connection with its own name, so that the other side knows which node it has reached."""

    def __init__(self, address: str, name: str) -> None:
        self.socket = socket.create_server((address, 0), backlog=MAX_CONNECTIONS)
        self.port = int(self.socket.getsockname()[1])
        self.name = name
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):  # one that only wanted to connect is gone already
                connection.sendall(self.name.encode())

    def close(self) -> None:
        self.socket.close()


@dataclass(frozen=True)
class ConnectionTarget:
    host: str
    port: int
    name: str = ""  # that it must answer with; empty: a connection is enough


def try_connections(targets: Sequence[ConnectionTarget]) -> list[str]:
    """Connects to all at once. Returns what went wrong with each, or an empty text."""
    if not targets:
        return []
    with ThreadPoolExecutor(min(MAX_CONNECTIONS, len(targets))) as pool:
        return list(pool.map(try_connection, targets))


def try_connection(target: ConnectionTarget) -> str:
    try:
        with socket.create_connection((target.host, target.port), CONNECT_S) as connection:
            if not target.name:
                return ""
            connection.settimeout(CONNECT_S)
            answer = connection.recv(ANSWER_BYTES).decode(errors="replace")
            return "" if answer == target.name else "another machine answers there"
    except TimeoutError:
        return f"no answer within {CONNECT_S:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def check_connections(ports: Mapping[NodeRef, int], tried: Mapping[tuple[NodeRef, NodeRef], str]) -> Iterator[Finding]:
    """`ports`: where each node listens. `tried`: from, to, and what went wrong."""
    failed = {pair: why for pair, why in tried.items() if why}
    senders = {to: [pair for pair in tried if pair[1] == to] for to in ports}
    unreachable = [to for to, pairs in senders.items() if len(pairs) > 1 and all(pair in failed for pair in pairs)]
    for to in unreachable:
        what = f"no other node can connect to {to.host}:{ports[to]} ({failed[senders[to][0]]})"
        yield Finding("error", "ports", what, FIREWALL.format(host=to.host), (to,))
    for (start, to), why in failed.items():
        if to in unreachable:
            continue
        back = tried.get((to, start))
        what = f"{start.host} cannot connect to {to.host}:{ports[to]} ({why})"
        if back == "":
            what += f"; {to.host} to {start.host} works: a firewall on {to.host}, or a rule on the way"
        elif back:
            if list(ports).index(to) < list(ports).index(start):
                continue  # reported for the other direction
            what += f", nor {to.host} to {start.host} ({back}): no way between them"
        yield Finding("error", "ports", what, FIREWALL.format(host=to.host), (start, to))
    if tried and not failed:
        yield Finding("ok", "ports", "every node can connect to every other", nodes=tuple(ports))


def check_head(address: str, tried: Mapping[NodeRef, str]) -> Iterator[Finding]:
    """`tried`: what went wrong when each node connected to Ray's head process."""
    for why in dict.fromkeys(why for why in tried.values() if why):
        nodes = tuple(node for node, own in tried.items() if own == why)
        what = f"a new connection to the cluster's head, {address}, fails ({why}); those from before still work"
        yield Finding("error", "ports", what, f"open port {split_address(address)[1]} of the head to the nodes", nodes)


def check_own_name(name: str, addresses: Sequence[str]) -> Iterator[Finding]:
    """`addresses`: what the node's own name resolves to."""
    if not addresses:
        what = (
            f"its own name, {name}, has no address; gloo and NCCL get an interface from Corral, other programs may not"
        )
        yield Finding("note", "names", what, f"a line with {name} in /etc/hosts")
    elif all(is_loopback(address) for address in addresses):
        what = f"its own name, {name}, is {addresses[0]}, which other nodes cannot reach; Corral does not use it"
        yield Finding("note", "names", what, f"the node's real address for {name} in /etc/hosts, for other programs")


def check_interfaces(
    variables: Mapping[str, str], interfaces: Mapping[str, str], chosen: str | None
) -> Iterator[Finding]:
    """`interfaces`: the node's, with addresses. `chosen`: the one towards the head."""
    for variable in INTERFACE_VARIABLES:
        written = variables.get(variable, "")
        if not written or written.startswith("^"):
            continue
        is_prefix = variable.startswith("NCCL") and not written.startswith("=")
        names = [name for name in written.lstrip("=").split(",") if name]
        known = [*interfaces, "lo"]
        missing = [name for name in names if not any(is_named(name, one, is_prefix) for one in known)]
        if missing:
            present = ", ".join(f"{name} {address}" for name, address in interfaces.items()) or "none"
            what = f"{variable}={written}, and no interface {', '.join(missing)} has an address; there are {present}"
            yield Finding("error", "interfaces", what, f"unset {variable}: Corral finds the one that leads to the head")
        elif chosen is not None and not any(is_named(name, chosen, is_prefix) for name in names):
            what = f"{variable}={written}, and the way to the head is over {chosen}"
            yield Finding("note", "interfaces", what, f"unset {variable}, unless the other network is faster")


def is_named(written: str, interface: str, is_prefix: bool) -> bool:
    return interface.startswith(written) if is_prefix else interface == written


def check_variables(variables: Mapping[NodeRef, Mapping[str, str]]) -> Iterator[Finding]:
    """Variables must be the same everywhere; only an interface's name may differ with the machine."""
    for name in dict.fromkeys(name for own in variables.values() for name in own):
        values = {node: own.get(name) for node, own in variables.items()}
        if len(set(values.values())) == 1:
            continue
        without = tuple(node for node, value in values.items() if value is None)
        if without:
            what = f"{name} is set on {format_hosts(node for node in values if node not in without)} and not here"
            fix = "set it on all nodes or on none, before `corral up`"
            yield Finding("warning", "variables", what, fix, without)
        elif name not in INTERFACE_VARIABLES:
            what = f"{name} differs: " + ", ".join(f"{value} on {node.host}" for node, value in values.items())
            yield Finding("warning", "variables", what, "set it to the same on all nodes, before `corral up`")


def check_proxy(variables: Mapping[str, str], addresses: Sequence[str]) -> Iterator[Finding]:
    """`addresses`: of the nodes. Requests to Ray's dashboard would go through a proxy that does not know them."""
    names = ("http_proxy", "https_proxy", "all_proxy")
    proxy = next((one for name in names for one in (name, name.upper()) if variables.get(one)), None)
    if proxy is None:
        return
    excluded = (variables.get("no_proxy") or variables.get("NO_PROXY") or "").split(",")
    wanted = ["127.0.0.1", *addresses]
    missing = [address for address in wanted if not any(excludes(one.strip(), address) for one in excluded)]
    if missing:
        what = f"{proxy} is set, and no_proxy does not leave out {', '.join(missing[:4])}: jobs may not reach Ray"
        yield Finding("note", "proxy", what, f"export no_proxy={','.join(['localhost', *wanted[:4]])}")


def excludes(entry: str, address: str) -> bool:
    """Whether an entry of no_proxy matches: `*`, a prefix, or a network as `10.0.0.0/8`."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address) in ipaddress.ip_network(entry)
    return entry == "*" or (entry != "" and address.startswith(entry.removesuffix("*")))


# --- clocks: logs and file times of several nodes are compared, and a data hub's certificates are refused by a clock
# that is far off


@dataclass(frozen=True)
class ClockOffset:
    seconds: float  # by which the other clock is ahead of this one
    error_s: float  # the true offset is within so much of it: half of the round trip


def clock_offset(round_trips: Iterable[tuple[float, float, float]]) -> ClockOffset:
    """Offset of a clock from times of (sent here, answered there, received here). The shortest round trip is the most
    exact: the answer was made at some time between the two."""
    sent, answered, received = min(round_trips, key=lambda one: one[2] - one[0])
    return ClockOffset(answered - (sent + received) / 2, (received - sent) / 2)


def check_clocks(offsets: Mapping[NodeRef, ClockOffset]) -> Iterator[Finding]:
    """Compares with the median clock of the nodes."""
    if len(offsets) < 2:
        return
    usual = sorted(offsets.values(), key=lambda offset: offset.seconds)[(len(offsets) - 1) // 2]
    is_fine = True
    for node, offset in offsets.items():
        apart = offset.seconds - usual.seconds
        certain = abs(apart) - offset.error_s - usual.error_s
        if certain > CLOCK_WARNING_S:
            is_fine = False
            way = "ahead of" if apart > 0 else "behind"
            what = f"its clock is {abs(apart):.3g} s (± {offset.error_s:.1g}) {way} that of the other nodes"
            yield Finding("error" if certain > CLOCK_ERROR_S else "warning", "clocks", what, SET_CLOCK, (node,))
    if is_fine:
        most = max(abs(offset.seconds - usual.seconds) + offset.error_s for offset in offsets.values())
        yield Finding("ok", "clocks", f"within {max(most, 0.001):.1g} s of each other", nodes=tuple(offsets))


# --- how fast pairs of nodes sum a tensor together: what training and weight transfer wait for


def pair_rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """All pairs in as few rounds as possible: one node stays, the others move on by one place (the circle method)."""
    nodes: list[int | None] = list(range(num_nodes))
    if num_nodes % 2:
        nodes.append(None)
    half, found = len(nodes) // 2, []
    for _ in range(len(nodes) - 1):
        facing = zip(nodes[:half], reversed(nodes[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        nodes = [nodes[0], nodes[-1], *nodes[1:-1]]
    return [pairs for pairs in found if pairs]


def group_result(group: GroupSpeed, port: int | str | None, answers: Mapping[NodeRef, Any]) -> GroupSpeed:
    """The group with what its nodes have measured. A text instead of numbers is an error, and so is None."""
    results = [SILENT if port is None else port, *(answers.get(node, SILENT) for node in group.nodes)]
    errors = list(dict.fromkeys(error for error in results if isinstance(error, str)))
    if errors:
        return replace(group, error="; ".join([error for error in errors if error != SILENT] or errors))
    return replace(group, **answers[group.nodes[0]])


def check_speeds(groups: Sequence[GroupSpeed]) -> Iterator[Finding]:
    for backend in dict.fromkeys(group.backend for group in groups):
        own = [group for group in groups if group.backend == backend]
        for group in own:
            if group.error:
                what = f"{group} cannot sum a tensor together with {backend}: {group.error}"
                fix = "a firewall, or the wrong network: GLOO_SOCKET_IFNAME chooses another"
                if backend == "nccl":
                    fix = (
                        "run it again with NCCL_DEBUG=INFO; often /dev/shm, NCCL_SOCKET_IFNAME, or InfiniBand that "
                        "one node lacks"
                    )
                yield Finding("error", "all-reduce", what, fix, group.nodes)
        fine = [group for group in own if not group.error]
        for kind in dict.fromkeys(group.kind for group in fine):
            yield from compare_speeds([group for group in fine if group.kind == kind])


def compare_speeds(groups: Sequence[GroupSpeed]) -> Iterator[Finding]:
    """Of groups of one kind."""
    usual = median(group.bytes_per_s for group in groups)
    slow = [group for group in groups if group.bytes_per_s < FAR_SLOWER * usual]
    for group in slow:
        speeds = f"{format_speed(group.bytes_per_s)} with {group.backend}, and the median is {format_speed(usual)}"
        fix = "look at cable, switch port and interface speed (ethtool) of the node that all slow pairs share"
        yield Finding("warning", "all-reduce", f"{group}: {speeds}", fix, group.nodes)
    if not slow:
        latency = max(group.latency_s for group in groups)
        exchanged = format_speed(median(group.exchanged_per_s for group in groups))
        what = f"{groups[0].backend} {groups[0].kind}: {format_speed(usual)} (median), {latency * 1e6:.0f} µs at most"
        what += f"; all-to-all {exchanged}"
        if transports := sorted({transport for group in groups for transport in group.transports}):
            what += f"; over {' and '.join(transports)}"
        yield Finding("ok", "all-reduce", what)


# --- Ray's processes: what earlier clusters have left behind, and who may use those that run
#
# A worker without a raylet, and a raylet whose head does not answer, belong to nobody any more. A running Ray takes
# commands from whoever reaches one of its ports and, where it wants one, has the token.


def check_processes(
    table: ProcessTable, cluster: str | None, answers: Callable[[str], bool], own: Collection[str] = ()
) -> Iterator[Finding]:
    """`cluster`: host:port of the head that is checked. `answers`: whether a head does. `own`: heads of `corral up`."""
    rays = [process for process in table.values() if process.is_rays and not process.is_elsewhere]
    lost = [process for process in rays if process.name.startswith("ray::") and raylet_of(process, table) is None]
    heads = {head for process in rays if (head := process.head) is not None}
    dead = {head for head in heads if head != cluster and not answers(head)}
    stray = [*lost, *(process for process in rays if process.head in dead)]
    if stray:
        what = f"{describe(stray)}: of a Ray cluster that is gone; they keep memory, ports and devices"
        others = [process for process in stray if process.head not in own]
        fixes = [f"kill {' '.join(str(process.pid) for process in others)}"] if others else []
        fixes += ["`corral down`"] if len(others) < len(stray) else []
        yield Finding("warning", "stray processes", what, " and ".join(fixes))
    for head in sorted(heads - dead - {cluster}):
        servers = [process for process in rays if process.head == head and process.name in SERVERS]
        if servers and cluster is None:
            yield Finding("note", "other clusters", f"part of the Ray cluster of {head}: {describe(servers)}")
        elif servers:
            what = f"also part of another Ray cluster, of {head}: {describe(servers)}; both may use the same devices"
            fix = "`corral down` there if it is yours; else ask its user, or leave this node out"
            yield Finding("warning", "other clusters", what, fix)
    if not stray:
        yield Finding("ok", "stray processes", "none of an earlier Ray")


def describe(processes: Iterable[NodeProcess]) -> str:
    return format_some([str(process) for process in processes], MAX_PROCESSES)


@dataclass(frozen=True)
class OpenPort:
    """A port on which a process of Ray's takes connections from other machines."""

    port: int
    process: str
    wants_token: bool


def open_ports(table: ProcessTable) -> list[OpenPort]:
    """Open ports of this user's Ray processes, without the doctor itself; whose another user's are cannot be known."""
    ports = {one.inode: one.port for one in tcp_sockets() if one.is_listening and not is_loopback(one.host)}
    found = []
    for process in table.values():
        token = (raylet_of(process, table) or process).token
        if process.is_rays and token is not None and process.pid != os.getpid():
            own = {ports[inode] for inode in socket_inodes(process.pid) if inode in ports}
            found += [OpenPort(port, str(process), token) for port in own]
    return sorted(found, key=lambda one: one.port)


def check_open_ports(ports: Sequence[OpenPort], reached_from: str | None) -> Iterator[Finding]:
    """`ports`: those that other machines reach. `reached_from`: one that did; None where no other node tried."""
    unprotected = [one for one in ports if not one.wants_token]
    if unprotected:
        unprotected.sort(key=lambda one: not one.process.startswith(SERVERS))
        shown = format_some([f"{one.port} of {one.process}" for one in unprotected], MAX_PORTS)
        how = f"reached from {reached_from}" if reached_from else "they listen on all of its addresses"
        what = (
            f"Ray takes commands without a token on ports that are open to other machines ({shown}; {how}): whoever "
            "reaches them can run anything here as you"
        )
        fix = "stop it and start the cluster with `corral up`, which makes a token; or keep it on loopback"
        yield Finding("error", "access", what, fix)
    elif ports:
        yield Finding("ok", "access", "Ray wants a token")


@dataclass(frozen=True)
class TokenFile:
    path: str
    mode: int
    for_others: bool  # other users may open it; the folders above it let them through
    is_used: bool  # by a cluster that this node is part of

    @classmethod
    def at(cls, path: Path, is_used: bool) -> "TokenFile":
        mode = open_to = path.stat().st_mode & 0o777
        for folder in path.resolve().parents:
            open_to &= 0o700 | (folder.stat().st_mode & 0o011) * 0o7
        return cls(str(path), mode, bool(open_to & OTHERS_MODE), is_used)


def token_files() -> list[TokenFile]:
    """Token files that exist on this node."""
    named = [member.token_file for member in own_memberships()] + [os.environ.get("RAY_AUTH_TOKEN_PATH")]
    used = [Path(name) for name in named if name]
    candidates = dict.fromkeys([*used, default_token(), Path.home() / ".ray" / "auth_token"])
    return [TokenFile.at(path, path in used) for path in candidates if path.is_file()]


def check_token_files(files: Sequence[TokenFile]) -> Iterator[Finding]:
    for file in files:
        if file.for_others:
            what = f"{file.path} holds a token, and other users of the node may open it (mode {file.mode:04o})"
            yield Finding("error" if file.is_used else "warning", "token file", what, f"chmod 600 {file.path}")
