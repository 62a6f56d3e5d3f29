"""Who has a port, and which Ray processes run on this node besides ours."""

import os
import pwd
import socket
from dataclasses import dataclass
from pathlib import Path

LISTENING = "0A"
RAY_PROCESSES = ("gcs_server", "raylet")


@dataclass(frozen=True)
class Process:
    pid: int
    name: str
    user: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, user {self.user})"


def is_free(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True


def free_port(address: str, wanted: int) -> int:
    """That one, or the next that is free."""
    return next(port for port in range(wanted, 65536) if is_free(address, port))


def owner(port: int) -> Process | None:
    """The process that listens on a port, as far as this user may know."""
    inodes = {f"socket:[{inode}]" for inode in listeners(port)}
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(os.readlink(link) in inodes for link in folder.iterdir()):
                return process(int(folder.parent.name))
        except OSError:
            continue
    return None


def listeners(port: int) -> list[str]:
    """Inodes of the sockets that listen on a port."""
    rows = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows += [line.split() for line in Path(table).read_text().splitlines()[1:]]
        except OSError:
            continue
    return [row[9] for row in rows if row[3] == LISTENING and int(row[1].rpartition(":")[2], 16) == port]


def ray_processes() -> list[Process]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "comm").read_text().strip() in RAY_PROCESSES:
                found.append(process(int(folder.name)))
        except OSError:
            continue
    return [one for one in found if one is not None]


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
