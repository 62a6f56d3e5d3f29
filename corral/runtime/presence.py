"""A small file for each process of Corral on this node, which describes it, so that `corral stacks` can name it. The
file of a process that has ended is removed by the next process that reads it."""

import json
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from corral.child_process import read_stat
from corral.recipe.errors import UserError
from corral.runtime.membership import state_folder

logger = logging.getLogger(__name__)

PresenceKind = Literal["controller", "worker"]


@dataclass(frozen=True)
class Presence:
    """Description of a controller or worker. The start time tells it from a later process with the same id."""

    pid: int
    started: int  # in the kernel's ticks
    kind: PresenceKind
    run: str
    device: int | None
    roles: tuple[str, ...]
    folder: str = ""
    """Folder of the run. Runs of the same name may train in different ones."""


def announce(
    kind: PresenceKind, run: str, device: int | None = None, roles: Sequence[str] = (), folder: Path | str = ""
) -> None:
    """Writes the file of this process. Where that fails the run goes on, and the process is not named."""
    pid = os.getpid()
    stat = read_stat(pid)
    presence = Presence(pid, stat.started if stat else 0, kind, run, device, tuple(roles), str(folder))
    try:
        folder = processes_folder()
        folder.mkdir(exist_ok=True)
        present()  # removes the files of processes that have ended
        (folder / f"{pid}.json").write_text(json.dumps(asdict(presence)))
    except (OSError, UserError) as error:
        logger.info("`corral stacks` will not know this process: %s", error)


def present() -> list[Presence]:
    """Processes of this node that have a file and still run."""
    found = []
    for path in sorted(processes_folder().glob("*.json")):
        try:
            fields = json.loads(path.read_text())
            presence = Presence(**{**fields, "roles": tuple(fields["roles"])})
        except (ValueError, TypeError, KeyError, OSError):
            continue
        stat = read_stat(presence.pid)
        if stat is not None and stat.started == presence.started:
            found.append(presence)
        else:
            path.unlink(missing_ok=True)
    return found


def processes_folder() -> Path:
    """A folder for each PID namespace: containers may share /tmp, and their process ids are their own."""
    namespace = re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    return state_folder() / f"processes-{namespace}"
