"""Who may use a node's Ray: whoever reaches one of its ports and, where Ray wants one, has the token."""

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from corral.cluster.doctor.findings import Finding
from corral.cluster.processes import SERVERS, Table, raylet_of
from corral.runtime.membership import own_memberships
from corral.runtime.token import default_token

LISTENING = "0A"
PRIVATE = 0o077
SHOWN = 3


@dataclass(frozen=True)
class OpenPort:
    """On which a process of Ray's takes connections from other machines."""

    port: int
    process: str
    wants_token: bool


def open_ports(table: Table) -> list[OpenPort]:
    """Of this user's Ray processes; of others' one cannot know which port is whose."""
    sockets = listening(Path("/proc/net/tcp").read_text(), socket.AF_INET)
    if Path("/proc/net/tcp6").exists():
        sockets |= listening(Path("/proc/net/tcp6").read_text(), socket.AF_INET6)
    found = []
    for process in table.values():
        if process.pid == os.getpid():
            continue  # the doctor itself
        token = (raylet_of(process, table) or process).token
        if process.is_rays and token is not None:
            for port in {sockets[inode] for inode in socket_inodes(process.pid) if inode in sockets}:
                found.append(OpenPort(port, str(process), token))
    return sorted(found, key=lambda one: one.port)


def listening(table: str, family: socket.AddressFamily) -> dict[str, int]:
    """Ports by the inode of the socket, of those that are not on loopback. `table`: /proc/net/tcp, which has addresses
    in words of the machine's own byte order."""
    found = {}
    for line in table.splitlines()[1:]:
        fields = line.split()
        address, _, port = fields[1].rpartition(":")
        if fields[3] == LISTENING and not is_loopback(address, family):
            found[fields[9]] = int(port, 16)
    return found


def is_loopback(written: str, family: socket.AddressFamily) -> bool:
    packed = b"".join(struct.pack("=I", int(written[at : at + 8], 16)) for at in range(0, len(written), 8))
    address = ipaddress.ip_address(socket.inet_ntop(family, packed))
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def socket_inodes(pid: int) -> set[str]:
    try:
        links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    except OSError:
        return set()
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def check_open_ports(ports: Sequence[OpenPort], reached_from: str | None) -> Iterator[Finding]:
    """`ports`: those that other machines reach. `reached_from`: one that did; None where nobody else was asked."""
    naked = [one for one in ports if not one.wants_token]
    if not naked:
        if ports:
            yield Finding("ok", "access", "Ray wants a token")
        return
    first = sorted(naked, key=lambda one: not one.process.startswith(SERVERS))
    more = f" and {len(first) - SHOWN} more" if len(first) > SHOWN else ""
    shown = ", ".join(f"{one.port} of {one.process}" for one in first[:SHOWN]) + more
    how = f"reached from {reached_from}" if reached_from else "they listen on all of its addresses"
    yield Finding(
        "error",
        "access",
        f"Ray takes commands without a token on ports that are open to other machines ({shown}; {how}): whoever "
        "reaches them can run anything here as you",
        "stop it and start the cluster with `corral up`, which makes a token; or keep it on loopback",
    )


@dataclass(frozen=True)
class TokenFile:
    path: str
    mode: int
    for_others: bool
    """Other users may open it; the folders above it let them through."""
    is_used: bool
    """By a cluster that this node is part of."""


def token_files() -> list[TokenFile]:
    """That exist on this node."""
    named = [member.token_file for member in own_memberships()] + [os.environ.get("RAY_AUTH_TOKEN_PATH")]
    used = [Path(name) for name in named if name]
    candidates = dict.fromkeys([*used, default_token(), Path.home() / ".ray" / "auth_token"])
    return [token_file(path, path in used) for path in candidates if path.is_file()]


def token_file(path: Path, is_used: bool) -> TokenFile:
    mode = path.stat().st_mode & 0o777
    open_to = mode
    for folder in path.resolve().parents:
        passes = folder.stat().st_mode & 0o011
        open_to &= 0o700 | passes * 0o7
    return TokenFile(str(path), mode, bool(open_to & PRIVATE), is_used)


def check_token_files(files: Sequence[TokenFile]) -> Iterator[Finding]:
    for file in files:
        if file.for_others:
            what = f"{file.path} holds a token, and other users of the node may open it (mode {file.mode:04o})"
            yield Finding("error" if file.is_used else "warning", "token file", what, f"chmod 600 {file.path}")
