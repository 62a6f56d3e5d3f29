"""The processes of a node, and what can be known of Ray's.

Ray names its workers `ray::NAME`; their ancestor is the node's raylet, whose command line has the address of its head.
"""

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

SERVERS = ("gcs_server", "raylet")
HELPERS = ("ray/dashboard/", "ray/_private/", "ray/autoscaler/", "ray.util.client.server")
"""Parts of the command lines of Ray's processes that are written in Python."""


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    name: str
    command: str
    user: str
    token: bool | None = None
    """Of Ray's servers: whether they want one. None: not known, as of another user's. (Workers, too, do as their raylet
    does; but they write their name over the place where their environment was.)"""
    is_elsewhere: bool = False
    """In a container with a network of its own, whose Ray is another node's and whose head cannot be reached from here;
    or another user's, of which one cannot know."""

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, {self.user})"

    @property
    def is_rays(self) -> bool:
        return self.name in SERVERS or self.name.startswith("ray::") or any(part in self.command for part in HELPERS)


Table = Mapping[int, Process]


def all_processes() -> dict[int, Process]:
    found = (read_process(Path("/proc", name)) for name in os.listdir("/proc") if name.isdecimal())
    return {process.pid: process for process in found if process is not None}


def read_process(folder: Path) -> Process | None:
    """None: it has ended, or is a thread of the kernel or a process of which only the exit code is left."""
    try:
        fields = (folder / "stat").read_text()
        state, parent = fields.rpartition(")")[2].split()[:2]
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        name = (folder / "comm").read_text().strip()
        uid = folder.stat().st_uid
    except OSError:
        return None
    if state == "Z" or not command:
        return None
    name = full_name(name, command)
    process = Process(int(folder.name), int(parent), name, command, user_name(uid))
    if not process.is_rays:
        return process
    process = replace(process, is_elsewhere=network_of(folder) != network_of(Path("/proc/self")))
    if name.startswith("ray::"):
        return process
    try:
        entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return process
    return replace(process, token="RAY_AUTH_MODE=token" in entries)


def network_of(folder: Path) -> str:
    try:
        return os.readlink(folder / "ns" / "net")
    except OSError:
        return ""


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


def raylet_of(process: Process, table: Table) -> Process | None:
    """The raylet that started it, or it itself."""
    current: Process | None = process
    while current is not None:
        if current.name == "raylet":
            return current
        current = table.get(current.parent)
    return None


def head_of(process: Process) -> str | None:
    """host:port of the head that a process of Ray's was started for, from its command line."""
    words = [word for word in process.command.split() if word.startswith("--")]
    options = dict(word.lstrip("-").replace("_", "-").split("=", 1) for word in words if "=" in word)
    if process.name == "gcs_server" and "gcs-server-port" in options:
        return f"{options.get('node-ip-address', '127.0.0.1')}:{options['gcs-server-port']}"
    is_client_server = "ray.util.client.server" in process.command
    return options.get("address" if is_client_server else "gcs-address")
