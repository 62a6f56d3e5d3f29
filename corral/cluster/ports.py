"""Who has a port, and which Ray processes run on this node besides ours."""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from corral.cluster.addresses import is_loopback
from corral.cluster.processes import SERVERS, Process, all_processes, network_of, read_process
from corral.recipe.errors import UserError

LISTENING = "0A"
TRIED = 100


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
    folders = Path("/proc").glob("[0-9]*")
    return next((read_process(folder) for folder in folders if listening & inodes_of(int(folder.name))), None)


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
    """Of this machine's network; those of containers with a network of their own are nobody's concern. Another user's
    do not say, and most likely share it."""
    own = network_of(Path("/proc/self"))
    servers = [process for process in all_processes().values() if process.name in SERVERS]
    return [process for process in servers if network_of(Path("/proc", str(process.pid))) in (own, "")]
