"""Checks of the Ray processes on a node: what earlier clusters have left behind, and who may use those that run.

A worker without a raylet, and a raylet whose head does not answer, belong to nobody any more. A running Ray takes
commands from whoever reaches one of its ports and, where it wants one, has the token.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.cluster.doctor.findings import Finding, format_some
from corral.cluster.node_processes import SERVERS, NodeProcess, ProcessTable, raylet_of, socket_inodes, tcp_sockets
from corral.runtime.membership import own_memberships
from corral.runtime.network import is_loopback
from corral.runtime.token import default_token

OTHERS_MODE = 0o077
MAX_PROCESSES = 6
MAX_PORTS = 3


def check_processes(
    table: ProcessTable, cluster: str | None, answers: Callable[[str], bool], own: Collection[str] = ()
) -> Iterator[Finding]:
    """`cluster`: host:port of the head of the cluster that is checked. `answers`: whether a head does. `own`: heads of
    clusters of which `corral up` made this node a part."""
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
    """Open ports of this user's Ray processes, without the doctor itself; of others' one cannot know which port is
    whose."""
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
            passes = folder.stat().st_mode & 0o011
            open_to &= 0o700 | passes * 0o7
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
