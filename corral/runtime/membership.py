"""This node's membership in clusters that `corral up` started: the record of it, and the processes that belong to it.

Every process that `corral up` starts has a mark in its environment, and so have all that these start: Ray's own,
workers, jobs. That is how `corral down` knows which processes to end, whatever else runs on the node.
"""

import json
import os
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from corral.child_process import read_stat
from corral.recipe.errors import UserError

MARK_VARIABLE = "CORRAL_UP"
RECORD = "member.json"


def state_folder() -> Path:
    """Folder of this user's state on this node. Not below $TMPDIR, which may differ between two shells; and short,
    because Ray's sockets are in it."""
    return private_folder(Path(f"/tmp/corral-{os.getuid()}"))


def private_folder(folder: Path) -> Path:
    """Makes a folder that only its user can open, and returns it. Ray opens its session folders and the sockets in them
    to everybody, so whoever could enter the folder, or put another in its place, could take a run over. Raises for one
    that is there and differs."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UserError(f"{folder} must be a folder, and your own; user {found.st_uid} has made it: choose another")
    if found.st_mode & 0o077:
        mode = f"its mode is {found.st_mode & 0o777:o}"
        raise UserError(f"{folder} must be a folder that only you can open, and {mode}: `chmod 700` it, or remove it")
    for parent in folder.resolve().parents:
        if parent.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            raise UserError(f"anybody can replace {folder}, since all may write to {parent}: choose another place")
    return folder


@dataclass(frozen=True)
class Membership:
    id: str  # of the cluster: of the launcher's job, or made by the head
    mark: str
    rank: int | None
    num_nodes: int | None  # None: any number may join
    address: str  # of Ray's head process, host:port
    node_address: str
    is_head: bool
    dashboard: str | None  # where the head serves it, for those who can reach it
    token_file: str | None  # None: the cluster is open to all who can reach it
    devices: int
    temp_dir: str
    head_file: str | None
    started: float
    gcs_storage: bool = False  # of a head: whether its GCS has its tables on disk and is started again

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def is_alive(self) -> bool:
        return any(name == "raylet" for _, name in marked_processes(self.mark))

    def write(self) -> None:
        folder = member_folder(self.port)
        folder.mkdir(exist_ok=True)
        (folder / RECORD).write_text(json.dumps(asdict(self), indent=1))

    def forget(self) -> None:
        (member_folder(self.port) / RECORD).unlink(missing_ok=True)

    @classmethod
    def read(cls, record: Path) -> Self | None:
        """None where another version of Corral wrote it, or it was never finished."""
        try:
            return cls(**json.loads(record.read_text()))
        except (ValueError, TypeError, FileNotFoundError):
            return None


def member_folder(port: int) -> Path:
    return state_folder() / f"ray-{port}"


def own_memberships() -> list[Membership]:
    """Memberships in clusters that run; other records are of a time before the node was switched off."""
    records = sorted(state_folder().glob(f"ray-*/{RECORD}"))
    found = [Membership.read(record) for record in records]
    return [member for member in found if member is not None and member.is_alive]


def find_membership(address: str | None = None) -> Membership | None:
    """The membership in the cluster with this address (host:port), or the only one."""
    found = own_memberships()
    if address is not None:
        return next((member for member in found if member.address == address), None)
    if len(found) > 1:
        names = ", ".join(member.address for member in found)
        raise UserError(f"this node is part of several clusters: {names}; say which one with --address")
    return found[0] if found else None


def marked_processes(mark: str) -> list[tuple[int, str]]:
    """Processes of this node with that mark, and their names. Other users' are not readable, and not ours.

    A process that gives itself a title, as Ray's do, may write it over its environment, and with it over the mark; it
    is then found by its parent.
    """
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found: dict[int, str] = {}
    children: dict[int, dict[int, str]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if (process := read_stat(pid)) is None:
            continue
        children.setdefault(process.parent, {})[pid] = process.name
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found[pid] = process.name
    left = list(found)
    while left:
        new = {pid: name for pid, name in children.get(left.pop(), {}).items() if pid not in found}
        found |= new
        left += new
    return list(found.items())
