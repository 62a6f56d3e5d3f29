"""Who has a port, and which Ray processes run on this node besides ours."""

import os
import pwd
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from corral.cluster.addresses import is_loopback
from corral.recipe.errors import UserError

LISTENING = "0A"
TRIED = 100
RAY_PROCESSES = ("gcs_server", "raylet")


@dataclass(frozen=True)
class Process:
    pid: int
    name: str
    user: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, user {self.user})"


def is_free(address: str, port: int) -> bool:
    """On that address, or, if others can reach it, on any: Ray's head listens on all of them then."""
    every = address if is_loopback(address) else "0.0.0.0"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((every, port))
        except OSError:
            return False
        return True


def free_port(address: str, wanted: int) -> int:
    """That one, or one of the next."""
    ports = range(wanted, min(wanted + TRIED, 65536))
    found = next((port for port in ports if is_free(address, port)), None)
    if found is None:
        raise UserError(f"no port from {wanted} on can be used on {address}; is that an address of this node?")
    return found


def owner(port: int) -> Process | None:
    """The process that listens on a port, as far as this user may know."""
    listening = {one.inode for one in sockets() if one.is_listening and one.port == port}
    pids = (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))
    return next((process(pid) for pid in pids if listening & inodes_of(pid)), None)


def talks_to(pid: int, port: int) -> bool:
    """Whether a process has a connection to that port of whatever machine."""
    return bool({one.inode for one in sockets() if one.peer_port == port} & inodes_of(pid))


@dataclass(frozen=True)
class Socket:
    port: int
    peer_port: int
    is_listening: bool
    inode: str


def sockets() -> list[Socket]:
    """TCP, of this machine."""
    rows = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            rows += [line.split() for line in Path(table).read_text().splitlines()[1:]]
    return [Socket(port_of(row[1]), port_of(row[2]), row[3] == LISTENING, f"socket:[{row[9]}]") for row in rows]


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def inodes_of(pid: int) -> set[str]:
    """Of what a process has open; nothing of another user's."""
    found = set()
    with suppress(OSError):
        for link in Path("/proc", str(pid), "fd").iterdir():
            with suppress(OSError):
                found.add(os.readlink(link))
    return found


def ray_processes() -> list[Process]:
    """Of this machine's network; those of containers with a network of their own are nobody's concern."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "comm").read_text().strip() in RAY_PROCESSES and shares_network(folder):
                found.append(process(int(folder.name)))
        except OSError:
            continue
    return [one for one in found if one is not None]


def shares_network(folder: Path) -> bool:
    """Another user's process does not say; it most likely does."""
    try:
        return os.readlink(folder / "ns" / "net") == os.readlink("/proc/self/ns/net")
    except PermissionError:
        return True


def process(pid: int) -> Process | None:
    folder = Path("/proc", str(pid))
    try:
        uid = folder.stat().st_uid
        name = (folder / "comm").read_text().strip()
    except OSError:
        return None
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return Process(pid, name, user)
