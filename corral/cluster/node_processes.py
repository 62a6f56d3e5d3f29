"""Processes of this node and their TCP sockets, from /proc, and what can be known of Ray's.

Ray names its workers `ray::NAME`; their ancestor is the node's raylet, whose command line has the address of its head.
"""

import ipaddress
import os
import pwd
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from corral.child_process import read_stat
from corral.recipe.errors import UserError
from corral.runtime.network import is_loopback

SERVERS = ("gcs_server", "raylet")
HELPERS = ("ray/dashboard/", "ray/_private/", "ray/autoscaler/", "ray.util.client.server")
"""Parts of the command lines of Ray's processes that are written in Python."""
LISTENING = "0A"


@dataclass(frozen=True)
class NodeProcess:
    pid: int
    parent: int
    name: str
    command: str
    user: str
    token: bool | None = None
    """Of Ray's servers: whether they want a token. None: not known, as of another user's. (Workers, too, do as their
    raylet does; but they write their name over the place where their environment was.)"""
    is_elsewhere: bool = False
    """In a container with a network of its own, whose Ray is another node's and whose head cannot be reached from here;
    or another user's, of which one cannot know."""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, {self.user})"

    @property
    def is_rays(self) -> bool:
        return self.name in SERVERS or self.name.startswith("ray::") or any(part in self.command for part in HELPERS)

    @property
    def head(self) -> str | None:
        """host:port of the head that a process of Ray's was started for, from its command line."""
        words = [word for word in self.command.split() if word.startswith("--")]
        options = dict(word.lstrip("-").replace("_", "-").split("=", 1) for word in words if "=" in word)
        if self.name == "gcs_server" and "gcs-server-port" in options:
            return f"{options.get('node-ip-address', '127.0.0.1')}:{options['gcs-server-port']}"
        return options.get("address" if "ray.util.client.server" in self.command else "gcs-address")


ProcessTable = Mapping[int, NodeProcess]


def all_processes() -> dict[int, NodeProcess]:
    found = (read_process(Path("/proc", name)) for name in os.listdir("/proc") if name.isdecimal())
    return {process.pid: process for process in found if process is not None}


def read_process(folder: Path) -> NodeProcess | None:
    """None: it has ended, or is a thread of the kernel or a process of which only the exit code is left."""
    pid = int(folder.name)
    try:
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        uid = folder.stat().st_uid
    except OSError:
        return None
    if (stat := read_stat(pid)) is None or stat.state == "Z" or not command:
        return None
    process = NodeProcess(pid, stat.parent, full_name(stat.name, command), command, user_name(uid))
    if not process.is_rays:
        return process
    process = replace(process, is_elsewhere=network_of(folder) != network_of(Path("/proc/self")))
    if process.name.startswith("ray::"):
        return process
    try:
        variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return process
    return replace(process, token="RAY_AUTH_MODE=token" in variables)


def full_name(name: str, command: str) -> str:
    """The kernel keeps 15 characters of a name, and calls every program in Python `python`."""
    words = command.split()
    if words[0].startswith("ray::"):
        return words[0]
    script = next((word for word in words[:4] if any(part in word for part in HELPERS)), None)
    return name if script is None else f"Ray's {Path(script).name}"


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def network_of(folder: Path) -> str:
    """Network namespace of a process; empty for another user's, which is not readable."""
    try:
        return os.readlink(folder / "ns" / "net")
    except OSError:
        return ""


def raylet_of(process: NodeProcess, table: ProcessTable) -> NodeProcess | None:
    """The raylet that started the process, or the process itself if it is one."""
    current: NodeProcess | None = process
    while current is not None and current.name != "raylet":
        current = table.get(current.parent)
    return current


def ray_servers() -> list[NodeProcess]:
    """Ray's servers in this machine's network; those of containers with a network of their own do not count. Another
    user's network is not readable, and most likely the same."""
    own = network_of(Path("/proc/self"))
    servers = [process for process in all_processes().values() if process.name in SERVERS]
    return [process for process in servers if network_of(Path("/proc", str(process.pid))) in (own, "")]


@dataclass(frozen=True)
class TcpSocket:
    host: str
    port: int
    peer_port: int
    is_listening: bool
    inode: str


def tcp_sockets() -> list[TcpSocket]:
    """TCP sockets of this machine."""
    rows = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            rows += [line.split() for line in Path(table).read_text().splitlines()[1:]]
    return [
        TcpSocket(*parse_endpoint(own), parse_endpoint(peer)[1], state == LISTENING, f"socket:[{inode}]")
        for _, own, peer, state, *_, inode in (row[:10] for row in rows)
    ]


def parse_endpoint(written: str) -> tuple[str, int]:
    """Host and port as /proc/net/tcp has them: the address in 32-bit words of the machine's own byte order."""
    digits, _, port = written.rpartition(":")
    packed = b"".join(struct.pack("=I", int(digits[at : at + 8], 16)) for at in range(0, len(digits), 8))
    address = ipaddress.ip_address(socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed))
    return str(getattr(address, "ipv4_mapped", None) or address), int(port, 16)


def socket_inodes(pid: int) -> set[str]:
    """Inodes of what a process has open; none of another user's process."""
    found = set()
    with suppress(OSError):
        for link in Path("/proc", str(pid), "fd").iterdir():
            with suppress(OSError):
                found.add(os.readlink(link))
    return found


def port_owner(port: int) -> NodeProcess | None:
    """The process that listens on a port, as far as this user may know."""
    listening = {one.inode for one in tcp_sockets() if one.is_listening and one.port == port}
    folders = Path("/proc").glob("[0-9]*")
    return next((read_process(folder) for folder in folders if listening & socket_inodes(int(folder.name))), None)


def is_connected_to(pid: int, port: int) -> bool:
    """Whether a process has a connection to that port of any machine."""
    return bool({one.inode for one in tcp_sockets() if one.peer_port == port} & socket_inodes(pid))


def is_free(address: str, port: int) -> bool:
    """Whether the port is free on that address, or, if others can reach it, on all: Ray's head then listens on all."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address if is_loopback(address) else "0.0.0.0", port))
        except OSError:
            return False
        return True


def free_port(address: str, wanted: range) -> int:
    """The first of these ports that is free."""
    found = next((port for port in wanted if port < 65536 and is_free(address, port)), None)
    if found is None:
        raise UserError(f"no port from {wanted[0]} on can be used on {address}; is that an address of this node?")
    return found
