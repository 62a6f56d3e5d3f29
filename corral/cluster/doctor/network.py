"""Who can connect to whom, and by which names and interfaces nodes would talk."""

import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from corral.cluster.addresses import is_loopback, resolve
from corral.cluster.doctor.findings import Finding, Place, hosts
from corral.runtime.network import INTERFACE_VARIABLES

CONNECT_S = 3.0
AT_ONCE = 32
COMPARED = ("NCCL_", "GLOO_", "UCX_", "RCCL_", "HSA_", "FI_")
"""Beginnings of variables that change how nodes talk: a node that has them alone talks past the others."""
ANSWER_BYTES = 64
FIREWALL = "open the ports between the nodes to each other (all of them: workers use any), on the firewall of {host}"


class Listener:
    """Answers everyone who connects with its own name, so that it is known who did."""

    def __init__(self, address: str, name: str) -> None:
        self.socket = socket.create_server((address, 0), backlog=AT_ONCE)
        self.port = int(self.socket.getsockname()[1])
        self.name = name
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):  # who only wanted to connect has gone already
                connection.sendall(self.name.encode())

    def close(self) -> None:
        self.socket.close()


@dataclass(frozen=True)
class Target:
    host: str
    port: int
    name: str = ""
    """That it is to answer with. Empty: to be connected is enough."""


def try_targets(targets: Sequence[Target]) -> list[str]:
    """What went wrong with each, or nothing; all at once."""
    if not targets:
        return []
    with ThreadPoolExecutor(min(AT_ONCE, len(targets))) as pool:
        return list(pool.map(try_target, targets))


def try_target(target: Target) -> str:
    try:
        with socket.create_connection((target.host, target.port), CONNECT_S) as connection:
            if target.name:
                connection.settimeout(CONNECT_S)
                said = connection.recv(ANSWER_BYTES).decode(errors="replace")
                return "" if said == target.name else "another machine answers there"
            return ""
    except TimeoutError:
        return f"no answer within {CONNECT_S:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def check_reach(ports: Mapping[Place, int], tried: Mapping[tuple[Place, Place], str]) -> Iterator[Finding]:
    """`ports`: where each node listens. `tried`: from, to, and what went wrong."""
    failed = {pair: why for pair, why in tried.items() if why}
    deaf = [to for to in ports if everyone(to, tried, failed)]
    for to in deaf:
        why = next(why for pair, why in failed.items() if pair[1] == to)
        what = f"no other node can connect to {to.host}:{ports[to]} ({why})"
        yield Finding("error", "ports", what, FIREWALL.format(host=to.host), (to,))
    for (start, to), why in failed.items():
        if to in deaf:
            continue
        back = tried.get((to, start))
        what = f"{start.host} cannot connect to {to.host}:{ports[to]} ({why})"
        if back == "":
            what += f"; {to.host} to {start.host} works: a firewall on {to.host}, or a rule on the way"
        elif back:
            if list(ports).index(to) < list(ports).index(start):
                continue  # told the other way round
            what += f", nor {to.host} to {start.host} ({back}): no way between them"
        yield Finding("error", "ports", what, FIREWALL.format(host=to.host), (start, to))
    if tried and not failed:
        yield Finding("ok", "ports", "every node can connect to every other", nodes=tuple(ports))


def everyone(to: Place, tried: Mapping[tuple[Place, Place], str], failed: Mapping[tuple[Place, Place], str]) -> bool:
    """Whether all others failed to reach it, and there are enough of them to say so."""
    others = [pair for pair in tried if pair[1] == to]
    return len(others) > 1 and all(pair in failed for pair in others)


def split(address: str) -> tuple[str, int]:
    """host:port"""
    host, _, port = address.rpartition(":")
    return host, int(port)


def check_head(address: str, tried: Mapping[Place, str]) -> Iterator[Finding]:
    """`tried`: what went wrong when each node connected to Ray's head process."""
    for why in dict.fromkeys(why for why in tried.values() if why):
        places = tuple(place for place, own in tried.items() if own == why)
        what = f"a new connection to the cluster's head, {address}, fails ({why}); those from before still work"
        fix = f"open port {split(address)[1]} of the head to the nodes"
        yield Finding("error", "ports", what, fix, places)


# --- names and interfaces


def check_own_name(name: str, addresses: Sequence[str]) -> Iterator[Finding]:
    """`addresses`: what the node's own name resolves to."""
    if not addresses:
        what = f"its own name, {name}, has no address; gloo and NCCL are told an interface, other programs may not be"
        yield Finding("note", "names", what, f"a line with {name} in /etc/hosts")
    elif all(is_loopback(address) for address in addresses):
        what = f"its own name, {name}, is {addresses[0]}, which other nodes cannot reach; Corral does not use it"
        yield Finding("note", "names", what, f"the node's real address for {name} in /etc/hosts, for other programs")


def own_name() -> tuple[str, list[str]]:
    name = socket.gethostname()
    return name, resolve(name)


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
        missing = [name for name in names if not any(found_as(name, one, is_prefix) for one in known)]
        if missing:
            there = ", ".join(f"{name} {address}" for name, address in interfaces.items()) or "none"
            what = f"{variable}={written}, and no interface {', '.join(missing)} has an address; there are {there}"
            yield Finding("error", "interfaces", what, f"unset {variable}: Corral finds the one that leads to the head")
        elif chosen is not None and not any(found_as(name, chosen, is_prefix) for name in names):
            what = f"{variable}={written}, and the way to the head is over {chosen}"
            yield Finding("note", "interfaces", what, f"unset {variable}, unless the other network is faster")


def found_as(written: str, interface: str, is_prefix: bool) -> bool:
    return interface.startswith(written) if is_prefix else interface == written


def own_variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(COMPARED)}


def check_variables(variables: Mapping[Place, Mapping[str, str]]) -> Iterator[Finding]:
    """The same everywhere, or an interface's name, which may differ with the machine."""
    names = dict.fromkeys(name for own in variables.values() for name in own)
    for name in names:
        values = {place: own.get(name) for place, own in variables.items()}
        if len(set(values.values())) == 1:
            continue
        without = [place for place, value in values.items() if value is None]
        if without:
            having = [place for place in values if place not in without]
            what = f"{name} is set on {hosts(having)} and not here"
            fix = "set it on all nodes or on none, before `corral up`"
            yield Finding("warning", "variables", what, fix, tuple(without))
        elif name not in INTERFACE_VARIABLES:
            what = f"{name} differs: " + ", ".join(f"{value} on {place.host}" for place, value in values.items())
            yield Finding("warning", "variables", what, "set it to the same on all nodes, before `corral up`")


def check_proxy(variables: Mapping[str, str], addresses: Sequence[str]) -> Iterator[Finding]:
    """`addresses`: of the nodes. Requests to Ray's dashboard go through a proxy that does not know them."""
    proxy = variables.get("http_proxy") or variables.get("HTTP_PROXY")
    if not proxy:
        return
    spared = (variables.get("no_proxy") or variables.get("NO_PROXY") or "").split(",")
    wanted = ["127.0.0.1", *addresses]
    missing = [address for address in wanted if not any(spares(one.strip(), address) for one in spared)]
    if missing:
        what = f"http_proxy is set, and no_proxy does not leave out {', '.join(missing[:4])}: jobs may not reach Ray"
        yield Finding("note", "proxy", what, f"export no_proxy={','.join(['localhost', *wanted[:4]])}")


def spares(written: str, address: str) -> bool:
    """An entry of no_proxy: `*`, a beginning, or a network as `10.0.0.0/8`."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address) in ipaddress.ip_network(written)
    return written == "*" or (written != "" and address.startswith(written.removesuffix("*")))
